// The shared memory of one block. It is the kernel module's thread-local segment on the block's OS thread (`__shared__` is
// `thread_local`), so host pointers into it are real, and a 32-bit shared address is the offset in it plus 1024: the first
// KB belongs to the system, as on sm_90. Bits 24.. of an address hold rank + 1 of the cluster peer that it lies in; 0 there
// is the block itself, so a shared::cta address is also a valid shared::cluster address, as in PTX.
//
// An access must lie in one static array, or in the dynamic bytes of the launch. Instrumented kernels have a gap behind each
// static array (cki/sim/elf.py), so that an overflow through a pointer does not meet the next one.
#pragma once
#include "types.h"

extern "C" struct cki_sim_shared_array {
  unsigned offset, bytes;    // in the window
};

namespace cki::sim {

struct Block;

constexpr u32 kSharedBase = 1024;
constexpr u32 kRankShift = 24;
constexpr u32 kAddressMask = (1u << kRankShift) - 1;

struct SharedWindow {
  u8* base = nullptr;
  u32 size = 0;              // static arrays and the whole area where dynamic shared memory may lie
  u32 dynamic_offset = 0;    // of the dynamic area in the window; a multiple of 1024
  u32 dynamic_size = 0;      // what the launch asked for
  const cki_sim_shared_array* arrays = nullptr;   // the static ones, in order
  u32 array_count = 0;

  bool contains(const void* pointer) const {
    return static_cast<std::size_t>(static_cast<const u8*>(pointer) - base) < size;
  }
  u32 offset(const void* pointer) const { return static_cast<u32>(static_cast<const u8*>(pointer) - base); }
  // Whether all bytes lie in one static array or in the dynamic bytes of this launch.
  bool valid(u32 offset, u32 bytes) const {
    if (offset >= size || bytes > size - offset) return false;
    if (offset >= dynamic_offset) return offset + bytes <= dynamic_offset + dynamic_size;
    for (u32 i = 0; i < array_count; ++i) {
      const u32 into = offset - arrays[i].offset;   // huge when it lies before the array
      if (into < arrays[i].bytes) return bytes <= arrays[i].bytes - into;
    }
    return false;
  }
};

// Where the byte at shared address `address` lies with rows of `span` bytes swizzled (128, 64, 32; 0: as it is): 16-byte
// chunks are permuted by address.
inline u32 swizzled(u32 span, u32 address) { return span ? address ^ (address >> 3 & (span - 16)) : address; }

// A place in the shared memory of a block of the cluster.
struct SharedPlace {
  Block* block;
  u32 offset;      // in block->window
  u8* pointer;     // the same place in the host's memory
};

// Reports an access to bytes of the window that are not valid, and ends the launch. subject: what it is by, for the report.
[[noreturn]] void beyond_shared(const SharedWindow& window, u32 offset, u32 bytes, const char* subject, CallSite site);

// Translations for the current thread's block; faults are fatal with the kernel's line.
SharedPlace shared_place(u32 address, u32 bytes, CallSite site);             // shared::cta or shared::cluster address
SharedPlace shared_place_of(Block& block, u32 address, u32 bytes, CallSite site);   // seen from that block, any time
u8* shared_pointer(u32 address, u32 bytes, CallSite site);                   // shorthand for .pointer
u32 shared_address(const void* pointer, CallSite site);                      // of this block's or a peer's memory
u32 map_to_rank(u32 address, u32 rank, CallSite site);                       // mapa

}  // namespace cki::sim
