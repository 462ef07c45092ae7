// The bridge from an argument array in the manner of cuLaunchKernel to a kernel's parameters.
#pragma once
#include <type_traits>
#include <utility>

namespace cki_sim_detail {

// Not instrumented, and neither is whoever it is inlined into: the array lies in the host's memory, which is none of the
// kernel's tensors. Through a volatile pointer, so that the kernel keeps its own, instrumented, body.
#define CKI_SIM_NOT_INSTRUMENTED __attribute__((no_sanitize("thread")))

template <class... P, std::size_t... I>
CKI_SIM_NOT_INSTRUMENTED void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  void (*volatile called)(P...) = kernel;
  (void)arguments;   // a kernel without parameters
  called(*static_cast<std::remove_reference_t<P>*>(arguments[I])...);
}

template <class... P>
CKI_SIM_NOT_INSTRUMENTED void call(void (*kernel)(P...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<P...>{});
}

}  // namespace cki_sim_detail
