// What ptx/memory.cuh needs of the runtime: the report of a misaligned access.
#include "engine.h"
#include "report.h"

using namespace cki::sim;

extern "C" [[noreturn]] void cki_sim_misaligned(const void* pointer, int bytes) {
  fatal(CKI_SIM_CALL_SITE, "misaligned address %p: an access of %d bytes needs a multiple of %d", pointer, bytes,
        bytes);
}
