// Simulated ptx/wgmma.cuh: runtime/wgmma.cpp.
#pragma once

#include "common/types.cuh"
#include "common/wgmma_descriptor.cuh"

extern "C" {
void cki_sim_wgmma(float* d, int columns, int type, unsigned long a, unsigned long b, int a_mn_major, int b_mn_major,
                   int accumulate);
void cki_sim_wgmma_registers(float* d, int columns, int type, const unsigned* a, unsigned long b, int b_mn_major,
                             int accumulate);
void cki_sim_wgmma_fence();
void cki_sim_wgmma_commit_group();
void cki_sim_wgmma_wait_group(int newest_allowed);
}

namespace cki::ptx {

namespace detail {

// WgmmaType of the runtime.
template <typename Element>
constexpr int kWgmmaType = -1;
template <>
inline constexpr int kWgmmaType<f16> = 0;
template <>
inline constexpr int kWgmmaType<bf16> = 1;
template <>
inline constexpr int kWgmmaType<e4m3> = 2;
template <>
inline constexpr int kWgmmaType<float> = 3;

template <int N, typename Element, Major MajorA, Major MajorB>
constexpr void check_wgmma() {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N is a multiple of 8 up to 256");
  static_assert(kWgmmaType<Element> >= 0, "wgmma takes f16, bf16, e4m3 or float");
  static_assert(kWgmmaType<Element> < 2 || (MajorA == Major::k && MajorB == Major::k), "8 and 32 bits: K-major only");
}

}  // namespace detail

template <int N, typename Element, Major MajorA = Major::k, Major MajorB = Major::k>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], u64 a_descriptor, u64 b_descriptor, bool accumulate) {
  detail::check_wgmma<N, Element, MajorA, MajorB>();
  cki_sim_wgmma(d, N, detail::kWgmmaType<Element>, a_descriptor, b_descriptor, MajorA == Major::mn, MajorB == Major::mn,
                accumulate);
}

template <int N, typename Element, Major MajorB = Major::k>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 b_descriptor, bool accumulate) {
  detail::check_wgmma<N, Element, Major::k, MajorB>();
  cki_sim_wgmma_registers(d, N, detail::kWgmmaType<Element>, a, b_descriptor, MajorB == Major::mn, accumulate);
}

__device__ __forceinline__ void wgmma_fence() { cki_sim_wgmma_fence(); }
__device__ __forceinline__ void wgmma_commit_group() { cki_sim_wgmma_commit_group(); }

template <int N>
__device__ __forceinline__ void wgmma_wait_group() {
  static_assert(N >= 0 && N <= 7, "wgmma.wait_group takes 0 to 7");
  cki_sim_wgmma_wait_group(N);
}

template <int Count>
__device__ __forceinline__ void wgmma_fence_registers(float (&)[Count]) {}

template <int Count>
__device__ __forceinline__ void wgmma_fence_registers(u32 (&)[Count]) {}

}  // namespace cki::ptx
