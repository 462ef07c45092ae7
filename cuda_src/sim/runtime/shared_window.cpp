// Translation between 32-bit shared addresses and host pointers, with the checks that the hardware would make.
#include "shared_window.h"

#include <cstdio>

#include "scheduler.h"

namespace cki::sim {

namespace {

Block& block_of_address(Block& block, u32 address, CallSite site) {
  const u32 tag = address >> kRankShift;
  if (tag == 0) return block;
  const u32 rank = tag - 1, size = block.group->cluster_size;
  if (rank >= size) fatal(site, "shared address 0x%x names rank %u of a cluster of %u", address, rank, size);
  Block& peer = block.group->peer(block, rank);
  if (peer.live == 0 && &peer != &block)
    fatal(site, "access to the shared memory of cluster rank %u, whose threads have all exited", rank);
  return peer;
}

}  // namespace

void beyond_shared(const SharedWindow& window, u32 offset, u32 bytes, const char* subject, CallSite site) {
  const i64 at = offset;
  if (offset >= window.dynamic_offset || window.array_count == 0)
    out_of_bounds(site, "%s of %u bytes at offset %d of the %u bytes of dynamic shared memory", subject, bytes,
                  static_cast<int>(at - window.dynamic_offset), window.dynamic_size);
  // Name the nearest array: most faults lie just beyond one.
  const cki_sim_shared_array* nearest = window.arrays;
  auto distance = [at](const cki_sim_shared_array& array) {
    return at < array.offset ? array.offset - at : at - array.offset - array.bytes;
  };
  for (u32 i = 1; i < window.array_count; ++i)
    if (distance(window.arrays[i]) < distance(*nearest)) nearest = &window.arrays[i];
  out_of_bounds(site, "%s of %u bytes at offset %d of a static shared array of %u bytes", subject, bytes,
                static_cast<int>(at - nearest->offset), nearest->bytes);
}

SharedPlace shared_place_of(Block& from, u32 address, u32 bytes, CallSite site) {
  Block& block = block_of_address(from, address, site);
  const SharedWindow& window = block.window;
  const u32 local = address & kAddressMask, offset = local - kSharedBase;
  if (local < kSharedBase || offset >= window.size || bytes > window.size - offset)
    out_of_bounds(site, "shared address 0x%x (%u bytes) lies outside the block's shared memory", address, bytes);
  if (!window.valid(offset, bytes)) {
    char subject[64];
    std::snprintf(subject, sizeof subject, "shared address 0x%x: access", address);
    beyond_shared(window, offset, bytes, subject, site);
  }
  return {&block, offset, window.base + offset};
}

SharedPlace shared_place(u32 address, u32 bytes, CallSite site) {
  return shared_place_of(current_block(), address, bytes, site);
}

u8* shared_pointer(u32 address, u32 bytes, CallSite site) { return shared_place(address, bytes, site).pointer; }

u32 shared_address(const void* pointer, CallSite site) {
  const Block& block = current_block();
  if (block.window.contains(pointer)) return kSharedBase + block.window.offset(pointer);
  for (const Block* peer : block.group->blocks)
    if (peer->window.contains(pointer) && peer->view.cluster_index.x == block.view.cluster_index.x &&
        peer->view.cluster_index.y == block.view.cluster_index.y &&
        peer->view.cluster_index.z == block.view.cluster_index.z)
      return (peer->view.rank_in_cluster + 1) << kRankShift | (kSharedBase + peer->window.offset(pointer));
  fatal(site, "generic pointer %p is not a shared memory address", pointer);
}

u32 map_to_rank(u32 address, u32 rank, CallSite site) {
  const u32 size = current_group().cluster_size;
  if (rank >= size) fatal(site, "mapa to rank %u of a cluster of %u", rank, size);
  return (rank + 1) << kRankShift | (address & kAddressMask);
}

}  // namespace cki::sim

using namespace cki::sim;

extern "C" unsigned cki_sim_shared_address(const void* pointer) { return shared_address(pointer, CKI_SIM_CALL_SITE); }

extern "C" void* cki_sim_shared_pointer(unsigned address) { return shared_pointer(address, 1, CKI_SIM_CALL_SITE); }

extern "C" unsigned cki_sim_mapa(unsigned address, unsigned rank) {
  return map_to_rank(address, rank, CKI_SIM_CALL_SITE);
}

extern "C" void* cki_sim_mapa_pointer(const void* pointer, unsigned rank) {
  const CallSite site = CKI_SIM_CALL_SITE;
  return shared_pointer(map_to_rank(shared_address(pointer, site), rank, site), 1, site);
}
