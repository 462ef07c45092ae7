// Fences and warp-wide settings that only the checks can see: fence.proxy.async and setmaxnreg.
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

extern "C" void cki_sim_setmaxnreg(int registers) {
  warp_rendezvous(CKI_SIM_CALL_SITE, kSetmaxnreg, "setmaxnreg", kFullWarp, 0, static_cast<u32>(registers), nullptr,
                  check_equal);
}
