// Fences and warp-wide settings that only the checks can see: fence.proxy.async and setmaxnreg.
#include <algorithm>

#include "collectives.h"
#include "engine.h"
#include "race.h"
#include "scheduler.h"
#include "warp.h"

using namespace cki::sim;

namespace {

void check_equal(Thread& last, WarpOperation& operation) {
  for (u32 lane = 0; lane < kWarpSize; ++lane) {
    if (operation.mask >> lane & 1 && operation.argument[lane] != operation.argument[last.lane()]) {
      fatal(operation.site, "setmaxnreg: the lanes of a warp name different counts, %u and %u",
            operation.argument[lane], operation.argument[last.lane()]);
    }
  }
}

}  // namespace

extern "C" void cki_sim_fence_proxy_async() {
  if (RaceDetector* races = detector()) races->fence_proxy_async();
}

extern "C" void cki_sim_setmaxnreg(int registers, bool is_decrease) {
  // Of a thread at the launch, at most: an SM has 65536, given by eights. The hardware traps on a decrease to more.
  const u32 threads = current_thread().block->thread_count();
  const u32 most = std::min(255u, 65536 / threads / 8 * 8);
  if (is_decrease && static_cast<u32>(registers) > most) {
    fatal(CKI_SIM_CALL_SITE, "setmaxnreg.dec to %d registers, where a thread of a block of %u begins with %u at most",
          registers, threads, most);
  }
  warp_rendezvous(CKI_SIM_CALL_SITE, kSetmaxnreg, "setmaxnreg", kFullWarp, 0, static_cast<u32>(registers), nullptr,
                  check_equal);
}
