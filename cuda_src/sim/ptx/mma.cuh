// Simulated ptx/mma.cuh: runtime/mma.cpp.
#pragma once

#include "common/types.cuh"

extern "C" {
void cki_sim_mma_m16n8k16_f16(float* d, const unsigned* a, const unsigned* b, const float* c);
void cki_sim_mma_m16n8k16_bf16(float* d, const unsigned* a, const unsigned* b, const float* c);
void cki_sim_mma_m16n8k8_tf32(float* d, const unsigned* a, const unsigned* b, const float* c);
void cki_sim_mma_m16n8k32_e4m3(float* d, const unsigned* a, const unsigned* b, const float* c);
}

namespace cki::ptx {

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                                 const float (&c)[4]) {
  cki_sim_mma_m16n8k16_f16(d, a, b, c);
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                                  const float (&c)[4]) {
  cki_sim_mma_m16n8k16_bf16(d, a, b, c);
}

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                                 const float (&c)[4]) {
  cki_sim_mma_m16n8k8_tf32(d, a, b, c);
}

__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                                  const float (&c)[4]) {
  cki_sim_mma_m16n8k32_e4m3(d, a, b, c);
}

}  // namespace cki::ptx
