// Bounds of memory accesses in instrumented kernels: an access is right when it lies in the block's shared memory (or a
// cluster peer's), on the fiber's own stack, in the kernel module's constants, or in one of the launch's tensors.
// Extents are exact, so one element past a tensor is found whatever lies behind it. A launch that names no extents
// has only its shared memory checked.
#pragma once
#include <vector>

#include "types.h"

extern "C" struct cki_sim_extent {
  const void* address;
  unsigned long long bytes;
};

namespace cki::sim {

class Bounds {
 public:
  void set(const cki_sim_extent* extents, u64 count, const void* code_of_module);
  // Reports an access by the kernel to [pointer, pointer + bytes) and ends the launch when it is out of bounds.
  void check(const void* pointer, std::size_t bytes, bool write, CallSite site) const;

 private:
  struct Range {
    const u8* begin;
    const u8* end;
  };
  bool covered(const u8* pointer, std::size_t bytes) const;
  std::vector<Range> tensors_;   // sorted, touching ones merged
  std::vector<Range> module_;    // its loaded segments
};

// For engines that access global memory on a thread's behalf (cp.async, TMA): checks when the launch asked for it.
void check_global(const void* pointer, std::size_t bytes, bool write, CallSite site);

}  // namespace cki::sim
