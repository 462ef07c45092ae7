// st.async: stores into the shared memory of a block of the cluster that complete on an mbarrier there. They land as bulk
// copies do: in adversarial mode later, with their target filled with one bits until then.
#include <array>
#include <cstring>

#include "bulk.h"
#include "shared_window.h"

using namespace cki::sim;

extern "C" void cki_sim_store_async(unsigned address, const void* value, unsigned barrier) {
  CallSite site = CKI_SIM_CALL_SITE;
  const u32 tag = address >> kRankShift;
  if (tag != barrier >> kRankShift)
    fatal(site, "st.async to shared 0x%x with the mbarrier 0x%x of another block", address, barrier);
  std::array<u8, 16> bytes;
  std::memcpy(bytes.data(), value, bytes.size());
  // Both lie in the other block where these places are in this one.
  issue_bulk_load({shared_pointer(address & kAddressMask, 16, site), shared_pointer(barrier & kAddressMask, 8, site), 16,
                   16, 16, tag == 0 ? 0 : 1u << (tag - 1),
                   [bytes](const SharedPlace& target) { std::memcpy(target.pointer, bytes.data(), bytes.size()); }},
                  site);
}
