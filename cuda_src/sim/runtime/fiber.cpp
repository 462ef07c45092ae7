// Stacks, and the three ways to switch between them.
#include "fiber.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace cki::sim {

u8* allocate_stack() {
  const std::size_t guard = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, kStackBytes + guard, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0) {
    std::fprintf(stderr, "cki: no memory for the stacks of the simulated device's threads\n");
    std::abort();
  }
  return static_cast<u8*>(memory) + guard;
}

#ifdef CKI_SIM_UCONTEXT

void prepare_fiber(Fiber& fiber, u8* stack, std::size_t size, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = size;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#else

void prepare_fiber(Fiber& fiber, u8* stack, std::size_t size, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + size - 64);
#if defined(__x86_64__)
  // `ret` pops the entry address, after which rsp must be 8 modulo 16 as after a call: `top` is 16-byte aligned, so it is.
  top[1] = nullptr;
  top[0] = reinterpret_cast<void*>(entry);
  void** frame = top - 6;                      // rbp rbx r12 r13 r14 r15
  std::memset(frame, 0, 6 * sizeof(void*));
#else
  void** frame = top - 20;                     // x19..x30, d8..d15
  std::memset(frame, 0, 20 * sizeof(void*));
  frame[11] = reinterpret_cast<void*>(entry);  // x30
#endif
  fiber.stack_pointer = frame;
}

#endif

}  // namespace cki::sim
