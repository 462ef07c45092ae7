// Vector<T, N>: N neighbouring elements moved by as few memory accesses as possible, and their values as fp32.
//
// A vector of up to 16 bytes is one access of 2, 4, 8 or 16 bytes (a warp then moves up to 512 bytes by one instruction);
// a longer one (fp32 weights beside 16-bit activations) is several of 16. Its address must be a multiple of
// `Vector<T, N>::kAlignment`. The bits are kept as 32-bit words, not as an array of T, because compilers split a copy of a
// struct of 16-bit members into 16-bit loads.
#pragma once

#include "common/convert_element.cuh"
#include "common/types.cuh"

namespace cki {

// Plain accesses, not inline PTX: the compiler may reorder them, and the simulated device checks their addresses.
__device__ __forceinline__ void load_words(const void* p, u32 (&w)[1]) { w[0] = *static_cast<const u32*>(p); }
__device__ __forceinline__ void load_words(const void* p, u32 (&w)[2]) {
  const uint2 v = *static_cast<const uint2*>(p);
  w[0] = v.x;
  w[1] = v.y;
}
template <int W>
__device__ __forceinline__ void load_words(const void* p, u32 (&w)[W]) {
  static_assert(W % 4 == 0, "more than 8 bytes: a multiple of 16");
#pragma unroll
  for (int i = 0; i < W; i += 4) {
    const uint4 v = static_cast<const uint4*>(p)[i / 4];
    w[i] = v.x;
    w[i + 1] = v.y;
    w[i + 2] = v.z;
    w[i + 3] = v.w;
  }
}

__device__ __forceinline__ void store_words(void* p, const u32 (&w)[1]) { *static_cast<u32*>(p) = w[0]; }
__device__ __forceinline__ void store_words(void* p, const u32 (&w)[2]) {
  *static_cast<uint2*>(p) = make_uint2(w[0], w[1]);
}
template <int W>
__device__ __forceinline__ void store_words(void* p, const u32 (&w)[W]) {
  static_assert(W % 4 == 0, "more than 8 bytes: a multiple of 16");
#pragma unroll
  for (int i = 0; i < W; i += 4) static_cast<uint4*>(p)[i / 4] = make_uint4(w[i], w[i + 1], w[i + 2], w[i + 3]);
}

template <typename T, int N>
struct Vector {
  static_assert(sizeof(T) == 4 || N % 2 == 0, "whole 32-bit words");
  static constexpr int kBytes = N * sizeof(T);
  static constexpr int kAlignment = kBytes < 16 ? kBytes : 16;
  static constexpr int kWords = kBytes / 4;
  u32 words[kWords];

  __device__ __forceinline__ void load(const T* p) { load_words(p, words); }
  __device__ __forceinline__ void store(T* p) const { store_words(p, words); }
  __device__ __forceinline__ void fill_zero() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
  }
  __device__ __forceinline__ void to_floats(float (&values)[N]) const {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = __uint_as_float(words[i]);
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 2) unpack_pair<T>(words[i / 2], values[i], values[i + 1]);
    }
  }
  __device__ __forceinline__ void from_floats(const float (&values)[N]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) words[i] = __float_as_uint(values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 2) words[i / 2] = pack_pair<T>(values[i], values[i + 1]);
    }
  }
};

// A single element: what data of odd width or odd address allow.
template <typename T>
struct Vector<T, 1> {
  static constexpr int kBytes = sizeof(T);
  static constexpr int kAlignment = sizeof(T);
  T element;

  __device__ __forceinline__ void load(const T* p) { element = *p; }
  __device__ __forceinline__ void store(T* p) const { *p = element; }
  __device__ __forceinline__ void fill_zero() { element = T{}; }
  __device__ __forceinline__ void to_floats(float (&values)[1]) const { values[0] = to_float(element); }
  __device__ __forceinline__ void from_floats(const float (&values)[1]) { element = from_float<T>(values[0]); }
};

// values = fp32 of p[0..N); p is aligned to Vector<T, N>::kAlignment.
template <int N, typename T>
__device__ __forceinline__ void load_floats(const T* p, float (&values)[N]) {
  Vector<T, N> vector;
  vector.load(p);
  vector.to_floats(values);
}

// p[0..N) = values, rounded to T; p is aligned to Vector<T, N>::kAlignment.
template <int N, typename T>
__device__ __forceinline__ void store_floats(T* p, const float (&values)[N]) {
  Vector<T, N> vector;
  vector.from_floats(values);
  vector.store(p);
}

}  // namespace cki
