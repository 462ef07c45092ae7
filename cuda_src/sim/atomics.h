// CUDA's atomics as atomics of the host: blocks run on several OS threads. Relaxed, as in CUDA; fences order them.
//
// An atomic that changes memory counts as progress, and one that leaves it as it was as a look at memory: a spin lock's
// failed attempt lets the others run, and the runtime can tell when nobody makes progress.
#pragma once

namespace cki_sim_detail {

__forceinline__ void after_atomic(bool changed) {
  if (changed)
    ++*cki_sim_thread->progress;
  else
    cki_sim_yield_after_look();
}

// Replaces *p by combine(*p) in one step and returns what it was.
template <class T, class Combine>
__forceinline__ T atomic_update(T* p, Combine combine) {
  T old, next;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  do {
    next = combine(old);
  } while (!__atomic_compare_exchange(p, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  after_atomic(std::memcmp(&old, &next, sizeof(T)) != 0);
  return old;
}

template <class T>
struct identity {
  using type = T;
};
template <class T>
using value_of = typename identity<T>::type;   // not deduced: atomicAdd(float*, 1) and the like work as in CUDA

}  // namespace cki_sim_detail

template <class T>
static __forceinline__ T atomicAdd(T* p, cki_sim_detail::value_of<T> value) {
  return cki_sim_detail::atomic_update(p, [value](T old) { return static_cast<T>(old + value); });
}
template <class T>
static __forceinline__ T atomicSub(T* p, cki_sim_detail::value_of<T> value) {
  return cki_sim_detail::atomic_update(p, [value](T old) { return static_cast<T>(old - value); });
}
template <class T>
static __forceinline__ T atomicMax(T* p, cki_sim_detail::value_of<T> value) {
  return cki_sim_detail::atomic_update(p, [value](T old) { return old < value ? value : old; });
}
template <class T>
static __forceinline__ T atomicMin(T* p, cki_sim_detail::value_of<T> value) {
  return cki_sim_detail::atomic_update(p, [value](T old) { return value < old ? value : old; });
}
template <class T>
static __forceinline__ T atomicAnd(T* p, cki_sim_detail::value_of<T> value) {
  return cki_sim_detail::atomic_update(p, [value](T old) { return old & value; });
}
template <class T>
static __forceinline__ T atomicOr(T* p, cki_sim_detail::value_of<T> value) {
  return cki_sim_detail::atomic_update(p, [value](T old) { return old | value; });
}
template <class T>
static __forceinline__ T atomicXor(T* p, cki_sim_detail::value_of<T> value) {
  return cki_sim_detail::atomic_update(p, [value](T old) { return old ^ value; });
}
template <class T>
static __forceinline__ T atomicExch(T* p, cki_sim_detail::value_of<T> value) {
  return cki_sim_detail::atomic_update(p, [value](T) { return value; });
}
static __forceinline__ unsigned atomicInc(unsigned* p, unsigned limit) {
  return cki_sim_detail::atomic_update(p, [limit](unsigned old) { return old >= limit ? 0u : old + 1; });
}
static __forceinline__ unsigned atomicDec(unsigned* p, unsigned limit) {
  return cki_sim_detail::atomic_update(p, [limit](unsigned old) { return old == 0 || old > limit ? limit : old - 1; });
}
template <class T>
static __forceinline__ T atomicCAS(T* p, cki_sim_detail::value_of<T> compare, cki_sim_detail::value_of<T> value) {
  const bool changed = __atomic_compare_exchange(p, &compare, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  cki_sim_detail::after_atomic(changed);
  return compare;
}
