// Instructions on memory that are more than a load or a store: fences of proxies, st.async, additions in global memory.
#include <array>
#include <cstring>

#include "bulk.h"
#include "convert.h"
#include "race.h"
#include "scheduler.h"
#include "tensor_map.h"

namespace cki::sim {

// ---- atomic additions by compare and exchange: blocks on several OS threads may add to one element ----

namespace {

template <class Bits, class Add>
void update(u8* global, const u8* value, Add add) {
  Bits* target = reinterpret_cast<Bits*>(global);
  Bits operand, old = __atomic_load_n(target, __ATOMIC_RELAXED);
  std::memcpy(&operand, value, sizeof operand);
  while (!__atomic_compare_exchange_n(target, &old, add(old, operand), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

template <class Bits, class Number>
Bits add_as(Bits a, Bits b) {
  Number x, y;
  std::memcpy(&x, &a, sizeof x);
  std::memcpy(&y, &b, sizeof y);
  x += y;
  std::memcpy(&a, &x, sizeof x);
  return a;
}

u16 add_f16(u16 a, u16 b) { return f32_to_f16_bits(f16_bits_to_f32(a) + f16_bits_to_f32(b)); }
u16 add_bf16(u16 a, u16 b) { return f32_to_bf16_bits(bf16_bits_to_f32(a) + bf16_bits_to_f32(b)); }

}  // namespace

bool can_add(TensorType type) {
  switch (type) {
    case TensorType::U32:
    case TensorType::I32:
    case TensorType::U64:
    case TensorType::I64:
    case TensorType::F16:
    case TensorType::Bf16:
    case TensorType::F32:
    case TensorType::F64: return true;
    default: return false;
  }
}

void add_to_global(TensorType type, u8* global, const u8* value) {
  switch (type) {
    case TensorType::U32:
    case TensorType::I32: return update<u32>(global, value, add_as<u32, u32>);
    case TensorType::U64:
    case TensorType::I64: return update<u64>(global, value, add_as<u64, u64>);
    case TensorType::F32: return update<u32>(global, value, add_as<u32, float>);
    case TensorType::F64: return update<u64>(global, value, add_as<u64, double>);
    case TensorType::F16: return update<u16>(global, value, add_f16);
    case TensorType::Bf16: return update<u16>(global, value, add_bf16);
    default: return;
  }
}

}  // namespace cki::sim

using namespace cki::sim;

extern "C" [[noreturn]] void cki_sim_misaligned(const void* pointer, int bytes) {
  fatal(CKI_SIM_CALL_SITE, "misaligned address %p: an access of %d bytes needs a multiple of %d", pointer, bytes,
        bytes);
}

// Only the checks can see it.
extern "C" void cki_sim_fence_proxy_async() {
  if (RaceDetector* races = detector()) races->fence_proxy_async();
}

// st.async: stores into the shared memory of a block of the cluster that complete on an mbarrier there. They land as bulk
// copies do: in adversarial mode later, with their target filled with one bits until then.
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
