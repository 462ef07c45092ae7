// The ABI that GCC and Clang call from code built with -fsanitize=thread,bounds. Sizes and names repeat, so the definitions
// are generated: here, and only here, by macros.
#include <cstring>

#include "report.h"
#include "tsan_hooks.h"

using namespace cki::sim;

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
