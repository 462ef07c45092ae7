// Simulated ptx/convert.cuh: to the bit what cvt gives.
#pragma once

#include "common/types.cuh"
#include "runtime/convert.h"

namespace cki::ptx {

__device__ __forceinline__ float f16_to_f32(f16 x) { return sim::f16_bits_to_f32_canonical(x.bits); }
__device__ __forceinline__ f16 f32_to_f16(float x) { return {sim::f32_to_f16_bits(x)}; }
__device__ __forceinline__ float bf16_to_f32(bf16 x) { return sim::bf16_bits_to_f32(x.bits); }
__device__ __forceinline__ bf16 f32_to_bf16(float x) { return {sim::f32_to_bf16_bits(x)}; }

__device__ __forceinline__ u32 f32x2_to_f16x2(float lo, float hi) {
  return sim::f32_to_f16_bits(lo) | static_cast<u32>(sim::f32_to_f16_bits(hi)) << 16;
}

__device__ __forceinline__ u32 f32x2_to_bf16x2(float lo, float hi) {
  return sim::f32_to_bf16_bits(lo) | static_cast<u32>(sim::f32_to_bf16_bits(hi)) << 16;
}

__device__ __forceinline__ void f16x2_to_f32x2(u32 x, float& lo, float& hi) {
  lo = f16_to_f32(f16{static_cast<u16>(x)});
  hi = f16_to_f32(f16{static_cast<u16>(x >> 16)});
}

__device__ __forceinline__ void bf16x2_to_f32x2(u32 x, float& lo, float& hi) {
  lo = bf16_to_f32(bf16{static_cast<u16>(x)});
  hi = bf16_to_f32(bf16{static_cast<u16>(x >> 16)});
}

__device__ __forceinline__ u16 f32x2_to_e4m3x2(float lo, float hi) {
  return static_cast<u16>(sim::f32_to_e4m3_bits(lo) | sim::f32_to_e4m3_bits(hi) << 8);
}

__device__ __forceinline__ u16 f32x2_to_e5m2x2(float lo, float hi) {
  return static_cast<u16>(sim::f32_to_e5m2_bits(lo) | sim::f32_to_e5m2_bits(hi) << 8);
}

__device__ __forceinline__ u32 e4m3x2_to_f16x2(u16 x) {
  return sim::e4m3_bits_to_f16_bits(static_cast<u8>(x)) |
         static_cast<u32>(sim::e4m3_bits_to_f16_bits(static_cast<u8>(x >> 8))) << 16;
}

__device__ __forceinline__ u32 e5m2x2_to_f16x2(u16 x) {
  return sim::e5m2_bits_to_f16_bits(static_cast<u8>(x)) |
         static_cast<u32>(sim::e5m2_bits_to_f16_bits(static_cast<u8>(x >> 8))) << 16;
}

__device__ __forceinline__ u32 f32_to_tf32(float x) { return sim::f32_to_tf32_bits(x); }

}  // namespace cki::ptx
