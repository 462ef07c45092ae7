// Atomic additions by compare and exchange: blocks on several OS threads may add to one element.
#include "global_add.h"

#include <cstring>

#include "convert.h"

namespace cki::sim {

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
