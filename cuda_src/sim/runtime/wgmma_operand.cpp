// Conversion of wgmma's operands to fp32 and the matrix product.
#include "wgmma.h"

#include <array>
#include <cstring>

#include "block.h"
#include "convert.h"
#include "matrix_block.h"

namespace cki::sim {

namespace {

constexpr u32 kRowsOfA = 64;

const std::array<float, 256>& e4m3_table() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values{};
    for (u32 i = 0; i < 256; ++i) values[i] = e4m3_bits_to_f32(static_cast<u8>(i));
    return values;
  }();
  return table;
}

template <float (*to_f32)(u16)>
struct SixteenBits {
  static constexpr u32 kK = 16, kPerRegister = 2, kPerChunk = 8;
  static void convert(const u8* chunk, float* out) {
    u16 bits[kPerChunk];
    std::memcpy(bits, chunk, kChunkBytes);
    for (u32 i = 0; i < kPerChunk; ++i) out[i] = to_f32(bits[i]);
  }
  static float element(u32 bits, u32 i) { return to_f32(static_cast<u16>(bits >> 16 * i)); }
};
using F16 = SixteenBits<f16_bits_to_f32>;
using Bf16 = SixteenBits<bf16_bits_to_f32>;

struct E4m3 {
  static constexpr u32 kK = 32, kPerRegister = 4, kPerChunk = 16;
  static void convert(const u8* chunk, float* out) {
    const float* table = e4m3_table().data();
    for (u32 i = 0; i < kPerChunk; ++i) out[i] = table[chunk[i]];
  }
  static float element(u32 bits, u32 i) { return e4m3_table()[bits >> 8 * i & 0xff]; }
};

// The lower 13 bits must be zero: what the hardware makes of others is its own affair, here a NaN.
struct Tf32 {
  static constexpr u32 kK = 8, kPerRegister = 1, kPerChunk = 4;
  static void convert(const u8* chunk, float* out) {
    u32 bits[kPerChunk];
    std::memcpy(bits, chunk, kChunkBytes);
    for (u32 i = 0; i < kPerChunk; ++i) out[i] = element(bits[i], 0);
  }
  static float element(u32 bits, u32) { return bits_float((bits & 0x1fff) == 0 ? bits : 0x7fffffffu); }
};

// Reads chunks from the window, each checked against the block's shared memory.
struct ChunkReader {
  Block& block;
  CallSite site;

  const u8* operator()(u32 address) const {
    const u32 offset = (address & 0x3ffff) - kSharedBase;
    if (!block.window.valid(offset, kChunkBytes)) {
      out_of_bounds(site, "wgmma operand at shared 0x%x lies outside the block's shared memory", address);
    }
    return block.window.base + offset;
  }
};

// Contiguous along the fast index of `out`: out[slow][fast], fast running over the elements of a chunk.
template <class Type>
void read_straight(const MatrixDescriptor& d, bool mn_major, u32 rows, u32 row_length, float* out, ChunkReader read) {
  for_each_chunk(d, mn_major, 0, rows, [&](u32 address, u32 slow, u32 chunk) {
    Type::convert(read(address), out + slow * row_length + chunk * Type::kPerChunk);
  });
}

// Across: out[fast][slow]. Eight chunks make a block whose transposition stays in the first-level cache.
template <class Type>
void read_transposed(const MatrixDescriptor& d, bool mn_major, u32 rows, u32 row_length, float* out, ChunkReader read) {
  constexpr u32 kBlock = 8;
  const u32 slow_count = mn_major ? 16 : rows, chunks = mn_major ? rows / 8 : 2;
  float block[kBlock][Type::kPerChunk];
  for (u32 slow = 0; slow < slow_count; slow += kBlock) {
    for (u32 chunk = 0; chunk < chunks; ++chunk) {
      for (u32 i = 0; i < kBlock; ++i) {
        Type::convert(read(mn_major ? d.mn_major(slow + i, chunk) : d.k_major(slow + i, chunk)), block[i]);
      }
      for (u32 fast = 0; fast < Type::kPerChunk; ++fast) {
        float* target = out + (chunk * Type::kPerChunk + fast) * row_length + slow;
        for (u32 i = 0; i < kBlock; ++i) target[i] = block[i][fast];
      }
    }
  }
}

template <class Type>
void registers_of(const u32 (*registers)[4], float* out) {
  constexpr u32 kPer = Type::kPerRegister, kHalf = Type::kK / 2;
  for (u32 thread = 0; thread < 128; ++thread) {
    const u32 lane = thread % kWarpSize, g = lane / 4, t = lane % 4;
    float* top = out + (thread / kWarpSize * 16 + g) * Type::kK + t * kPer;
    float* bottom = top + 8 * Type::kK;
    for (u32 i = 0; i < kPer; ++i) {
      top[i] = Type::element(registers[thread][0], i);
      bottom[i] = Type::element(registers[thread][1], i);
      top[kHalf + i] = Type::element(registers[thread][2], i);
      bottom[kHalf + i] = Type::element(registers[thread][3], i);
    }
  }
}

// Calls use(F16{}) or the like.
template <class Use>
void with_type(WgmmaType type, Use use) {
  switch (type) {
    case WgmmaType::F16: return use(F16{});
    case WgmmaType::Bf16: return use(Bf16{});
    case WgmmaType::E4m3: return use(E4m3{});
    case WgmmaType::Tf32: return use(Tf32{});
  }
}

}  // namespace

void read_operand_a(Block& block, const MatrixDescriptor& d, WgmmaType type, bool mn_major, u32 rows, float* out,
                    CallSite site) {
  with_type(type, [&](auto element) {
    using Type = decltype(element);
    const auto read = mn_major ? read_transposed<Type> : read_straight<Type>;
    read(d, mn_major, rows, Type::kK, out, {block, site});
  });
}

void read_operand_b(Block& block, const MatrixDescriptor& d, WgmmaType type, bool mn_major, u32 rows, float* out,
                    CallSite site) {
  with_type(type, [&](auto element) {
    using Type = decltype(element);
    const auto read = mn_major ? read_straight<Type> : read_transposed<Type>;
    read(d, mn_major, rows, rows, out, {block, site});
  });
}

void read_register_a(const u32 (*registers)[4], WgmmaType type, float* out) {
  with_type(type, [&](auto element) { registers_of<decltype(element)>(registers, out); });
}

void multiply_accumulate(const float* a, const float* b, float* d, u32 n, u32 k) {
  constexpr u32 kRows = 4;
  for (u32 row = 0; row < kRowsOfA; row += kRows) {
    u32 column = 0;
    for (; column + 16 <= n; column += 16) {
      multiply_block<kRows, 2>(a + row * k, k, 1, b + column, n, d + row * n + column, n, k);
    }
    for (; column < n; column += 8)
      multiply_block<kRows, 1>(a + row * k, k, 1, b + column, n, d + row * n + column, n, k);
  }
}

}  // namespace cki::sim
