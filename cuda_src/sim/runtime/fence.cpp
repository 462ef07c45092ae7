// fence.proxy.async, which only the checks can see.
#include "race.h"
#include "scheduler.h"

using namespace cki::sim;

extern "C" void cki_sim_fence_proxy_async() {
  if (RaceDetector* races = detector()) races->fence_proxy_async();
}
