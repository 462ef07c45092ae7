// A fiber: a stack of its own and a switch that changes stacks without the operating system.
// x86-64 and AArch64 have a switch in assembly (3-10 ns); elsewhere ucontext does it (240 ns, two system calls).
#pragma once
#include "types.h"

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(CKI_SIM_UCONTEXT)
#define CKI_SIM_UCONTEXT 1
#endif
#ifdef CKI_SIM_UCONTEXT
#include <ucontext.h>
#endif

namespace cki::sim {

constexpr std::size_t kStackBytes = 128 * 1024;  // pages that a thread never touches cost nothing

struct Fiber {
#ifdef CKI_SIM_UCONTEXT
  ucontext_t context;
#else
  void* stack_pointer = nullptr;
#endif
};

// Stacks with a guard page below each; kept until the process ends and reused by later blocks.
u8* allocate_stack();   // lowest usable byte

// The fiber will start in `entry`, with the stack's lowest `size` bytes (a multiple of 64). `entry` must not return.
void prepare_fiber(Fiber& fiber, u8* stack, std::size_t size, void (*entry)());

// Saves the running context in `from` and goes on in `to`.
#ifdef CKI_SIM_UCONTEXT
void switch_fiber(Fiber& from, Fiber& to);
#else
extern "C" __attribute__((visibility("hidden"))) void cki_sim_switch(void** save, void* load);
inline void switch_fiber(Fiber& from, Fiber& to) { cki_sim_switch(&from.stack_pointer, to.stack_pointer); }
#endif

}  // namespace cki::sim
