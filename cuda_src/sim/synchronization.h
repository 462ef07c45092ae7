// Block barriers, fences and other control. Every function here is inlined into the kernel, so that the return address which
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
