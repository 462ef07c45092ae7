// One element of any storage type to and from fp32.
//
// Kernels compute in fp32 and name their storage type `Element`; these overloads are what makes one kernel text serve
// f32, f16 and bf16. To fp32 is exact; to 16 bits rounds to nearest even, and a value beyond the type's range becomes an
// infinity.
#pragma once

#include "common/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/target.cuh"

namespace cki {

// Two e4m3 numbers of 8 bits each as two of f16, which holds them all: exact. Before sm_89 there is no instruction for it:
// the bits, moved to where f16 has them, are the number over 256, subnormal or not; the code of NaN is not.
template <int Sm = ptx::kTargetSm>
__device__ __forceinline__ u32 e4m3x2_as_f16x2(u16 codes) {
  if constexpr (Sm >= 89) {
    return ptx::e4m3x2_to_f16x2(codes);
  } else {
    const u32 spread = (codes & 0xffu) | static_cast<u32>(codes & 0xff00u) << 8;
    float low, high;
    ptx::f16x2_to_f32x2((spread & 0x007f007fu) << 7 | (spread & 0x00800080u) << 8, low, high);
    u32 words = ptx::f32x2_to_f16x2(low * 256.0f, high * 256.0f);
    if ((spread & 0x7fu) == 0x7fu) words |= 0x7fffu;
    if ((spread & 0x7f0000u) == 0x7f0000u) words |= 0x7fff0000u;
    return words;
  }
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(f16 x) { return ptx::f16_to_f32(x); }
__device__ __forceinline__ float to_float(bf16 x) { return ptx::bf16_to_f32(x); }
__device__ __forceinline__ float to_float(e4m3 x) {
  return ptx::f16_to_f32(f16{static_cast<u16>(e4m3x2_as_f16x2(x.bits))});
}

// Overloads on a tag, because a function template cannot be specialised partially and the return type alone differs.
template <typename T>
struct ElementTag {};
__device__ __forceinline__ float from_float(float x, ElementTag<float>) { return x; }
__device__ __forceinline__ f16 from_float(float x, ElementTag<f16>) { return ptx::f32_to_f16(x); }
__device__ __forceinline__ bf16 from_float(float x, ElementTag<bf16>) { return ptx::f32_to_bf16(x); }

// from_float<bf16>(x)
template <typename T>
__device__ __forceinline__ T from_float(float x) {
  return from_float(x, ElementTag<T>{});
}

// Two elements in one 32-bit word, the first in the lower half: one instruction for two conversions.
__device__ __forceinline__ void unpack_pair(u32 word, float& first, float& second, ElementTag<f16>) {
  ptx::f16x2_to_f32x2(word, first, second);
}
__device__ __forceinline__ void unpack_pair(u32 word, float& first, float& second, ElementTag<bf16>) {
  ptx::bf16x2_to_f32x2(word, first, second);
}
__device__ __forceinline__ u32 pack_pair(float first, float second, ElementTag<f16>) {
  return ptx::f32x2_to_f16x2(first, second);
}
__device__ __forceinline__ u32 pack_pair(float first, float second, ElementTag<bf16>) {
  return ptx::f32x2_to_bf16x2(first, second);
}

// unpack_pair<bf16>(word, a, b) and pack_pair<bf16>(a, b)
template <typename T>
__device__ __forceinline__ void unpack_pair(u32 word, float& first, float& second) {
  unpack_pair(word, first, second, ElementTag<T>{});
}
template <typename T>
__device__ __forceinline__ u32 pack_pair(float first, float second) {
  return pack_pair(first, second, ElementTag<T>{});
}

}  // namespace cki
