// Block barriers, fences and other control, and what a warp does together. Every function here is inlined into the kernel, so that the return address which
// the runtime takes for its reports is the kernel's own line.
#pragma once

static __forceinline__ void __syncthreads() { cki_sim_bar_sync(0, -1); }
static __forceinline__ int __syncthreads_or(int predicate) {
  return cki_sim_syncthreads_reduce(CKI_SIM_BARRIER_OR, predicate);
}
static __forceinline__ int __syncthreads_and(int predicate) {
  return cki_sim_syncthreads_reduce(CKI_SIM_BARRIER_AND, predicate);
}
static __forceinline__ int __syncthreads_count(int predicate) {
  return cki_sim_syncthreads_reduce(CKI_SIM_BARRIER_COUNT, predicate);
}

// The compiler turns these into a hook in instrumented kernels.
static __forceinline__ void __threadfence_block() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
static __forceinline__ void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static __forceinline__ void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// A kernel sleeps in polling loops: let everybody else run.
static __forceinline__ void __nanosleep(unsigned) { cki_sim_yield_poll(); }

static __forceinline__ void __trap() { cki_sim_trap(); }

#undef assert
#define assert(condition) ((condition) ? static_cast<void>(0) : cki_sim_assertion_failed(#condition))

// Loads with a cache hint are plain loads.
template <class T>
static __forceinline__ T __ldg(const T* p) { return *p; }
template <class T>
static __forceinline__ T __ldcg(const T* p) { return *p; }
template <class T>
static __forceinline__ T __ldcs(const T* p) { return *p; }
template <class T>
static __forceinline__ T __ldca(const T* p) { return *p; }
template <class T>
static __forceinline__ void __stcs(T* p, T value) { *p = value; }
template <class T>
static __forceinline__ void __stcg(T* p, T value) { *p = value; }

// ---- shuffles, votes, matches and reductions over the lanes of a mask ----

namespace cki_sim_detail {
// A lane's value travels as 64 bits; the width of the shuffle in the upper half of the argument.
template <class T>
__forceinline__ T shuffle(int operation, unsigned mask, T value, unsigned argument, int width) {
  static_assert(sizeof(T) <= 8, "shuffles take values of up to 8 bytes");
  unsigned long long bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = cki_sim_warp(operation, mask, bits, (argument & 0xffff) | static_cast<unsigned>(width) << 16);
  std::memcpy(static_cast<void*>(&value), &bits, sizeof value);
  return value;
}
}  // namespace cki_sim_detail

static __forceinline__ void __syncwarp(unsigned mask = 0xffffffffu) { cki_sim_warp(CKI_SIM_SYNCWARP, mask, 0, 0); }

template <class T>
static __forceinline__ T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return cki_sim_detail::shuffle(CKI_SIM_SHFL_IDX, mask, value, static_cast<unsigned>(lane) & 31, width);
}
template <class T>
static __forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return cki_sim_detail::shuffle(CKI_SIM_SHFL_UP, mask, value, delta, width);
}
template <class T>
static __forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return cki_sim_detail::shuffle(CKI_SIM_SHFL_DOWN, mask, value, delta, width);
}
template <class T>
static __forceinline__ T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  return cki_sim_detail::shuffle(CKI_SIM_SHFL_XOR, mask, value, static_cast<unsigned>(lane_mask) & 31, width);
}

static __forceinline__ unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(cki_sim_warp(CKI_SIM_BALLOT, mask, predicate != 0, 0));
}
static __forceinline__ int __all_sync(unsigned mask, int predicate) {
  return static_cast<int>(cki_sim_warp(CKI_SIM_ALL, mask, predicate != 0, 0));
}
static __forceinline__ int __any_sync(unsigned mask, int predicate) {
  return static_cast<int>(cki_sim_warp(CKI_SIM_ANY, mask, predicate != 0, 0));
}
template <class T>
static __forceinline__ unsigned __match_any_sync(unsigned mask, T value) {
  unsigned long long bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return static_cast<unsigned>(cki_sim_warp(CKI_SIM_MATCH_ANY, mask, bits, 0));
}
template <class T>
static __forceinline__ unsigned __match_all_sync(unsigned mask, T value, int* all_equal) {
  unsigned long long bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const unsigned lanes = static_cast<unsigned>(cki_sim_warp(CKI_SIM_MATCH_ALL, mask, bits, 0));
  *all_equal = lanes != 0;
  return lanes;
}

static __forceinline__ int __reduce_add_sync(unsigned mask, int value) {
  return static_cast<int>(cki_sim_warp(CKI_SIM_REDUCE_ADD, mask, static_cast<unsigned>(value), 0));
}
static __forceinline__ unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  return static_cast<unsigned>(cki_sim_warp(CKI_SIM_REDUCE_ADD, mask, value, 0));
}
static __forceinline__ int __reduce_min_sync(unsigned mask, int value) {
  return static_cast<int>(cki_sim_warp(CKI_SIM_REDUCE_MIN_SIGNED, mask, static_cast<unsigned>(value), 0));
}
static __forceinline__ unsigned __reduce_min_sync(unsigned mask, unsigned value) {
  return static_cast<unsigned>(cki_sim_warp(CKI_SIM_REDUCE_MIN_UNSIGNED, mask, value, 0));
}
static __forceinline__ int __reduce_max_sync(unsigned mask, int value) {
  return static_cast<int>(cki_sim_warp(CKI_SIM_REDUCE_MAX_SIGNED, mask, static_cast<unsigned>(value), 0));
}
static __forceinline__ unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return static_cast<unsigned>(cki_sim_warp(CKI_SIM_REDUCE_MAX_UNSIGNED, mask, value, 0));
}
static __forceinline__ unsigned __reduce_and_sync(unsigned mask, unsigned value) {
  return static_cast<unsigned>(cki_sim_warp(CKI_SIM_REDUCE_AND, mask, value, 0));
}
static __forceinline__ unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return static_cast<unsigned>(cki_sim_warp(CKI_SIM_REDUCE_OR, mask, value, 0));
}
static __forceinline__ unsigned __reduce_xor_sync(unsigned mask, unsigned value) {
  return static_cast<unsigned>(cki_sim_warp(CKI_SIM_REDUCE_XOR, mask, value, 0));
}

// Any subset of the warp that holds the caller is a legal answer. The smallest is the adversary's: code that counts on lanes
// having reconverged fails here, as it may on hardware.
static __forceinline__ unsigned __activemask() { return 1u << (cki_sim_thread->linear_index & 31); }
