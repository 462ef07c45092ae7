// Warpgroup matrix products, asynchronous (PTX wgmma, sm_90a): D[64xN] = A[64xK] B[KxN] (+ D), fp32 accumulation.
//
// K is 16 for f16 and bf16, 32 for e4m3, 8 for float, which is tf32: numbers whose lower 13 bits are zero. N any multiple of 8 up to 256. The instructions: ptx/wgmma_instruction.cuh.
//
// Order of calls, by all 128 threads of a warpgroup: wgmma_fence() once the accumulators (and A registers) have been
// written by ordinary code; products; wgmma_commit_group(); wgmma_wait_group<n>() before the accumulators or the A
// registers are touched again and before the operands in shared memory are overwritten.
//
// Accumulators: with warp w of the warpgroup, g = lane/4, t = lane%4, thread holds in
//   d[4j], d[4j+1]    row 16w+g,   columns 8j+2t, 8j+2t+1
//   d[4j+2], d[4j+3]  row 16w+g+8, same columns
// A in registers: as the A fragment of mma.cuh for rows 16w..16w+15. So the pairs (d[8k], d[8k+1]), (d[8k+2],
// d[8k+3]), (d[8k+4], d[8k+5]), (d[8k+6], d[8k+7]) of a product, packed to 16 bits, are a[0..3] of the k-th step of a
// next product. Operands in shared memory are named by descriptors: common/wgmma_descriptor.cuh.
#pragma once

#include "common/types.cuh"
#include "common/wgmma_descriptor.cuh"
#include "ptx/target.cuh"
#include "ptx/wgmma_instruction.cuh"

namespace cki::ptx {

// Which of the four supported element types Element is.
template <typename Element>
constexpr bool kIsF16 = false;
template <>
constexpr bool kIsF16<f16> = true;
template <typename Element>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<bf16> = true;
template <typename Element>
constexpr bool kIsE4m3 = false;
template <>
constexpr bool kIsE4m3<e4m3> = true;
template <typename Element>
constexpr bool kIsTf32 = false;
template <>
constexpr bool kIsTf32<float> = true;
template <typename Element>
constexpr bool kIsWgmmaElement = kIsF16<Element> || kIsBf16<Element> || kIsE4m3<Element> || kIsTf32<Element>;
template <typename Element>
constexpr bool kTransposes = kIsF16<Element> || kIsBf16<Element>;

// Both operands in shared memory. With accumulate = false D is overwritten, and need not be initialised.
template <int N, typename Element, Major MajorA = Major::k, Major MajorB = Major::k, bool Available = kTargetHasWgmma>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], u64 a_descriptor, u64 b_descriptor, bool accumulate) {
  static_assert(Available, "wgmma needs sm_90a");
  static_assert(kIsWgmmaElement<Element>, "wgmma takes f16, bf16, e4m3 or float");
  static_assert(kTransposes<Element> || (MajorA == Major::k && MajorB == Major::k), "8 and 32 bits: K-major only");
  constexpr int kTransposeA = MajorA == Major::mn;
  constexpr int kTransposeB = MajorB == Major::mn;
  if constexpr (kIsF16<Element>) {
    WgmmaInstruction<N>::template f16_shared<kTransposeA, kTransposeB>(d, a_descriptor, b_descriptor, accumulate);
  } else if constexpr (kIsBf16<Element>) {
    WgmmaInstruction<N>::template bf16_shared<kTransposeA, kTransposeB>(d, a_descriptor, b_descriptor, accumulate);
  } else if constexpr (kIsTf32<Element>) {
    WgmmaInstruction<N>::tf32_shared(d, a_descriptor, b_descriptor, accumulate);
  } else {
    WgmmaInstruction<N>::e4m3_shared(d, a_descriptor, b_descriptor, accumulate);
  }
}

// A in registers.
template <int N, typename Element, Major MajorB = Major::k, bool Available = kTargetHasWgmma>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 b_descriptor, bool accumulate) {
  static_assert(Available, "wgmma needs sm_90a");
  static_assert(kIsWgmmaElement<Element>, "wgmma takes f16, bf16, e4m3 or float");
  static_assert(kTransposes<Element> || MajorB == Major::k, "8 and 32 bits: K-major only");
  constexpr int kTransposeB = MajorB == Major::mn;
  if constexpr (kIsF16<Element>) {
    WgmmaInstruction<N>::template f16_registers<kTransposeB>(d, a, b_descriptor, accumulate);
  } else if constexpr (kIsBf16<Element>) {
    WgmmaInstruction<N>::template bf16_registers<kTransposeB>(d, a, b_descriptor, accumulate);
  } else if constexpr (kIsTf32<Element>) {
    WgmmaInstruction<N>::tf32_registers(d, a, b_descriptor, accumulate);
  } else {
    WgmmaInstruction<N>::e4m3_registers(d, a, b_descriptor, accumulate);
  }
}

// Orders ordinary accesses to accumulator and A registers before the products that follow. Not needed between
// products on the same accumulators.
template <bool Available = kTargetHasWgmma>
__device__ __forceinline__ void wgmma_fence() {
  static_assert(Available, "wgmma needs sm_90a");
  asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

// Closes the group of the products issued since the last commit.
template <bool Available = kTargetHasWgmma>
__device__ __forceinline__ void wgmma_commit_group() {
  static_assert(Available, "wgmma needs sm_90a");
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

// Waits until at most the N most recent groups are incomplete.
template <int N, bool Available = kTargetHasWgmma>
__device__ __forceinline__ void wgmma_wait_group() {
  static_assert(Available, "wgmma needs sm_90a");
  static_assert(N >= 0 && N <= 7, "wgmma.wait_group takes 0 to 7");
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory");
}

// No instruction: keeps the compiler from moving ordinary code on these registers across this point. Around a batch of
// products it stops ptxas from serialising them (info C7510).
template <int Count>
__device__ __forceinline__ void wgmma_fence_registers(float (&registers)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(registers[i]) : : "memory");
}

template <int Count>
__device__ __forceinline__ void wgmma_fence_registers(u32 (&registers)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(registers[i]) : : "memory");
}

}  // namespace cki::ptx
