// The compiler's hooks in an instrumented kernel. With -fsanitize=thread it calls a function for every load and store; we
// supply those functions instead of the sanitizer, so no sanitizer runtime is linked, nothing has to be
// preloaded, and one instrumented build serves races, bounds and hazards alike.
#include <cstring>

#include "bounds.h"
#include "launch.h"
#include "race.h"
#include "scheduler.h"

using namespace cki::sim;

// ---- what is checked at each access ----

namespace {

enum class AtomicAccess { Load, Store, Update };

// The shared memory that a pointer lies in: the block's own or a peer's.
bool find_shared(Block& block, const void* pointer, SharedPlace& place) {
  Block* owner = nullptr;
  if (block.window.contains(pointer)) {
    owner = &block;
  } else if (block.group->cluster_size > 1) {
    for (u32 rank = 0; rank < block.group->cluster_size; ++rank)
      if (block.group->peer(block, rank).window.contains(pointer)) owner = &block.group->peer(block, rank);
  }
  if (!owner) return false;
  const u32 offset = owner->window.offset(pointer);
  place = {owner, offset, owner->window.base + offset};
  return true;
}

void check_shared_bounds(const SharedPlace& place, u32 bytes, bool write, CallSite site) {
  const SharedWindow& window = place.block->window;
  if (!window.valid(place.offset, bytes))
    beyond_shared(window, place.offset, bytes, write ? "write" : "read", site);
}

// Everything but race detection; false when the access is not to shared memory or there is no one to check.
bool common_checks(const void* pointer, std::size_t bytes, bool write, CallSite site, SharedPlace& place) {
  if (!inside_kernel() || bytes == 0) return false;
  Block& block = current_block();
  Group& group = *block.group;
  if (!find_shared(block, pointer, place)) {
    if (group.checks.bounds) group.launch->bounds.check(pointer, bytes, write, site);
    return false;
  }
  if (group.checks.bounds) check_shared_bounds(place, static_cast<u32>(bytes), write, site);
  if (place.block != &block && place.block->live == 0)
    fatal(site, "access to the shared memory of cluster rank %u, whose threads have all exited",
          place.block->view.rank_in_cluster);
  const InFlight& in_flight = place.block->in_flight;
  if (in_flight.find_write(place.offset, static_cast<u32>(bytes)) >= 0)
    hazard(site, "%s shared 0x%x, the target of an asynchronous copy in flight", write ? "writes" : "reads",
           place.offset + kSharedBase);
  if (write && in_flight.find_read(place.offset, static_cast<u32>(bytes)) >= 0)
    hazard(site, "writes shared 0x%x, which an asynchronous operation in flight reads", place.offset + kSharedBase);
  return true;
}

bool acquires(int order) { return order == __ATOMIC_CONSUME || order == __ATOMIC_ACQUIRE || order >= __ATOMIC_ACQ_REL; }
bool releases(int order) { return order >= __ATOMIC_RELEASE; }

void hook_access(const void* pointer, std::size_t bytes, bool write, CallSite site) {
  SharedPlace place;
  if (!common_checks(pointer, bytes, write, site, place)) return;
  RaceDetector* races = detector();
  if (!races) return;
  if (write)
    races->write(place, static_cast<u32>(bytes), site, "writes");
  else
    races->read(place, static_cast<u32>(bytes), site, "reads");
}

void hook_atomic(const void* pointer, std::size_t bytes, AtomicAccess kind, int order, CallSite site) {
  if (!inside_kernel()) return;
  SharedPlace place;
  const bool shared = common_checks(pointer, bytes, kind != AtomicAccess::Load, site, place);
  RaceDetector* races = detector();
  if (!races) return;
  if (shared)
    races->atomic(place, static_cast<u32>(bytes), site, "accesses (atomic)", kind != AtomicAccess::Load);
  if (kind == AtomicAccess::Load)
    races->atomic_load(pointer, acquires(order));
  else if (kind == AtomicAccess::Store)
    races->atomic_store(pointer, releases(order));
  else
    races->atomic_update(pointer, acquires(order), releases(order));
}

void hook_fence(int order) {
  if (RaceDetector* races = inside_kernel() ? detector() : nullptr) races->fence(acquires(order), releases(order));
}

}  // namespace

// ---- the ABI that GCC and Clang call from code built with -fsanitize=thread,bounds. Sizes and names repeat, so the
// definitions are generated: here, and only here, by macros ----

#define CKI_PLAIN_HOOKS(prefix, size)                                                                          \
  extern "C" void __tsan_##prefix##read##size(void* p) { hook_access(p, size, false, CKI_SIM_CALL_SITE); }      \
  extern "C" void __tsan_##prefix##write##size(void* p) { hook_access(p, size, true, CKI_SIM_CALL_SITE); }      \
  extern "C" void __tsan_##prefix##read_write##size(void* p) { hook_access(p, size, true, CKI_SIM_CALL_SITE); }

// PTX gives volatile accesses the meaning of relaxed atomics.
#define CKI_VOLATILE_HOOKS(prefix, size)                                                 \
  extern "C" void __tsan_##prefix##volatile_read##size(void* p) {                         \
    hook_atomic(p, size, AtomicAccess::Load, __ATOMIC_RELAXED, CKI_SIM_CALL_SITE);        \
  }                                                                                      \
  extern "C" void __tsan_##prefix##volatile_write##size(void* p) {                        \
    hook_atomic(p, size, AtomicAccess::Store, __ATOMIC_RELAXED, CKI_SIM_CALL_SITE);       \
  }

CKI_PLAIN_HOOKS(, 1)
CKI_PLAIN_HOOKS(, 2)
CKI_PLAIN_HOOKS(, 4)
CKI_PLAIN_HOOKS(, 8)
CKI_PLAIN_HOOKS(, 16)
CKI_PLAIN_HOOKS(unaligned_, 2)
CKI_PLAIN_HOOKS(unaligned_, 4)
CKI_PLAIN_HOOKS(unaligned_, 8)
CKI_PLAIN_HOOKS(unaligned_, 16)
CKI_VOLATILE_HOOKS(, 1)
CKI_VOLATILE_HOOKS(, 2)
CKI_VOLATILE_HOOKS(, 4)
CKI_VOLATILE_HOOKS(, 8)
CKI_VOLATILE_HOOKS(, 16)
CKI_VOLATILE_HOOKS(unaligned_, 2)
CKI_VOLATILE_HOOKS(unaligned_, 4)
CKI_VOLATILE_HOOKS(unaligned_, 8)
CKI_VOLATILE_HOOKS(unaligned_, 16)

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_ignore_thread_begin() {}
void __tsan_ignore_thread_end() {}
void __tsan_read_range(void* p, std::size_t n) { hook_access(p, n, false, CKI_SIM_CALL_SITE); }
void __tsan_write_range(void* p, std::size_t n) { hook_access(p, n, true, CKI_SIM_CALL_SITE); }

void* __tsan_memcpy(void* to, const void* from, std::size_t n) {
  hook_access(from, n, false, CKI_SIM_CALL_SITE);
  hook_access(to, n, true, CKI_SIM_CALL_SITE);
  return std::memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, std::size_t n) {
  hook_access(from, n, false, CKI_SIM_CALL_SITE);
  hook_access(to, n, true, CKI_SIM_CALL_SITE);
  return std::memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, std::size_t n) {
  hook_access(to, n, true, CKI_SIM_CALL_SITE);
  return std::memset(to, value, n);
}

void __tsan_atomic_thread_fence(int order) {
  hook_fence(order);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
void __tsan_atomic_signal_fence(int) {}
}

// ---- atomics: the hook, then the operation itself, always in the strongest order (the host's order is not under test) ----

#define CKI_ATOMIC_UPDATE(bits, type, name, builtin)                                                   \
  extern "C" type __tsan_atomic##bits##_##name(volatile type* p, type v, int order) {                   \
    hook_atomic(const_cast<type*>(p), sizeof(type), AtomicAccess::Update, order, CKI_SIM_CALL_SITE);    \
    return builtin(p, v, __ATOMIC_SEQ_CST);                                                            \
  }

#define CKI_ATOMIC_COMPARE(bits, type, name)                                                                     \
  extern "C" int __tsan_atomic##bits##_compare_exchange_##name(volatile type* p, type* expected, type v, int order, \
                                                               int) {                                            \
    hook_atomic(const_cast<type*>(p), sizeof(type), AtomicAccess::Update, order, CKI_SIM_CALL_SITE);              \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);               \
  }

#define CKI_ATOMICS(bits, type)                                                                         \
  extern "C" type __tsan_atomic##bits##_load(const volatile type* p, int order) {                        \
    hook_atomic(const_cast<const type*>(p), sizeof(type), AtomicAccess::Load, order, CKI_SIM_CALL_SITE); \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                        \
  }                                                                                                     \
  extern "C" void __tsan_atomic##bits##_store(volatile type* p, type v, int order) {                     \
    hook_atomic(const_cast<type*>(p), sizeof(type), AtomicAccess::Store, order, CKI_SIM_CALL_SITE);      \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                           \
  }                                                                                                     \
  extern "C" type __tsan_atomic##bits##_compare_exchange_val(volatile type* p, type expected, type v, int order, int) { \
    hook_atomic(const_cast<type*>(p), sizeof(type), AtomicAccess::Update, order, CKI_SIM_CALL_SITE);     \
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);            \
    return expected;                                                                                    \
  }                                                                                                     \
  CKI_ATOMIC_COMPARE(bits, type, strong)                                                                \
  CKI_ATOMIC_COMPARE(bits, type, weak)                                                                  \
  CKI_ATOMIC_UPDATE(bits, type, exchange, __atomic_exchange_n)                                          \
  CKI_ATOMIC_UPDATE(bits, type, fetch_add, __atomic_fetch_add)                                          \
  CKI_ATOMIC_UPDATE(bits, type, fetch_sub, __atomic_fetch_sub)                                          \
  CKI_ATOMIC_UPDATE(bits, type, fetch_and, __atomic_fetch_and)                                          \
  CKI_ATOMIC_UPDATE(bits, type, fetch_or, __atomic_fetch_or)                                            \
  CKI_ATOMIC_UPDATE(bits, type, fetch_xor, __atomic_fetch_xor)                                          \
  CKI_ATOMIC_UPDATE(bits, type, fetch_nand, __atomic_fetch_nand)

CKI_ATOMICS(8, u8)
CKI_ATOMICS(16, u16)
CKI_ATOMICS(32, u32)
CKI_ATOMICS(64, u64)

// ---- array indices ----

namespace {

// What the compiler passes to the bounds handler (only the fields that are read).
struct SourceLocation {
  const char* file;
  u32 line, column;
};
struct OutOfBoundsData {
  SourceLocation location;
  const struct {
    u16 kind, info;
    char name[1];
  }* array_type;
};

}  // namespace

extern "C" void __ubsan_handle_out_of_bounds(OutOfBoundsData* data, std::size_t index) {
  out_of_bounds(CKI_SIM_CALL_SITE, "index %zd of an array of type %s", static_cast<ssize_t>(index),
                data->array_type->name);
}
