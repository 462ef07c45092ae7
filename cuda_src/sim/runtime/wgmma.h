// Operands of wgmma in shared memory: what a matrix descriptor addresses, chunk by chunk.
//
// The walk yields chunks of 16 bytes, the unit of the swizzle. A K-major operand of R rows has two chunks a row (an
// instruction takes 32 bytes along K); an MN-major one has R/8 chunks for each of its 16 K rows. The layouts are
// those of the PTX manual, "Matrix Descriptor" and "Strides" of wgmma, as cuda_src/common/wgmma_descriptor.cuh
// explains them.
#pragma once
#include <cstring>
#include <memory>
#include <vector>

#include "shared_window.h"

namespace cki::sim {

enum class WgmmaType : u8 { F16, Bf16, E4m3, Tf32 };

constexpr u32 kChunkBytes = 16;

struct MatrixDescriptor {
  u32 start, leading_bytes, stride_bytes, base_offset, span;   // span: bytes of a swizzled row, 0 for no swizzle

  static MatrixDescriptor decode(u64 bits) {
    constexpr u32 kSpan[] = {0, 128, 64, 32};
    const auto field = [bits](u32 shift, u32 width) {
      return static_cast<u32>(bits >> shift & ((u64{1} << width) - 1));
    };
    return {field(0, 14) << 4, field(16, 14) << 4, field(32, 14) << 4, field(49, 3), kSpan[field(62, 2)]};
  }

  // Chunk `chunk` (0 or 1) of row `row`.
  u32 k_major(u32 row, u32 chunk) const {
    const u32 group = start + row / 8 * stride_bytes;
    return span ? swizzled(span, group + row % 8 * span + chunk * kChunkBytes)
                : group + row % 8 * kChunkBytes + chunk * leading_bytes;
  }

  // The chunk of rows 8*chunk.. at K index k.
  u32 mn_major(u32 k, u32 chunk) const {
    if (!span) return start + chunk * stride_bytes + k % 8 * kChunkBytes + k / 8 * leading_bytes;
    const u32 chunks = span / kChunkBytes;
    return swizzled(span, start + k / 8 * stride_bytes + k % 8 * span + chunk % chunks * kChunkBytes +
                   chunk / chunks * leading_bytes);
  }
};

// Calls visit(address, row, chunk) for each chunk of a K-major operand, or visit(address, k, chunk) for an MN-major
// one, as far as it belongs to rows first_row .. first_row + rows (multiples of 8).
template <class Visit>
void for_each_chunk(const MatrixDescriptor& descriptor, bool mn_major, u32 first_row, u32 rows, Visit visit) {
  if (!mn_major) {
    for (u32 row = first_row; row < first_row + rows; ++row) {
      for (u32 chunk = 0; chunk < 2; ++chunk) visit(descriptor.k_major(row, chunk), row, chunk);
    }
    return;
  }
  for (u32 k = 0; k < 16; ++k) {
    for (u32 chunk = first_row / 8; chunk < (first_row + rows) / 8; ++chunk)
      visit(descriptor.mn_major(k, chunk), k, chunk);
  }
}

constexpr u32 kMaxWgmmaK = 32;
constexpr u32 wgmma_k(WgmmaType type) { return type == WgmmaType::E4m3 ? 32 : type == WgmmaType::Tf32 ? 8 : 16; }

struct Block;

// The operand as fp32. `rows` are M or N. A is wanted row by row, [rows][K]; B column by column, [K][rows].
void read_operand_a(Block& block, const MatrixDescriptor& descriptor, WgmmaType type, bool mn_major, u32 rows,
                    float* out, CallSite site);
void read_operand_b(Block& block, const MatrixDescriptor& descriptor, WgmmaType type, bool mn_major, u32 rows,
                    float* out, CallSite site);
// A from the registers of 128 threads, four each.
void read_register_a(const u32 (*registers)[4], WgmmaType type, float* out);

// d[64][n] += a[64][k] b[k][n]; n a multiple of 8.
void multiply_accumulate(const float* a, const float* b, float* d, u32 n, u32 k);

// ---- accumulators of products in flight: a tile of 64xN fp32 for a warpgroup, and their way from and to the threads'
// registers. While they are in flight, adversarial mode keeps a signalling NaN in the registers: arithmetic changes its
// bits ----

constexpr u32 kWarpgroupThreads = 128, kWarpgroupWarps = 4, kProductRows = 64,
              kMaxProductColumns = 256;   // of a warpgroup and its products
constexpr u32 kPoison = 0xffbfdead;

struct Accumulators {
  float* registers[kWarpgroupThreads] = {};   // of each thread that has deposited
  u32 columns = 0;
  u32 references = 0;   // products in the queue that use them
  alignas(64) float tile[kProductRows * kMaxProductColumns];
};

enum class Direction { ToTile, ToRegisters };

// Moves one thread's accumulators between its registers and the tile.
template <Direction direction>
void move_fragment(Accumulators& accumulators, u32 position, float* registers) {
  const u32 columns = accumulators.columns, lane = position % kWarpSize;
  float* top = accumulators.tile + (position / kWarpSize * 16 + lane / 4) * columns + lane % 4 * 2;
  float* bottom = top + 8 * columns;
  for (u32 j = 0; j < columns / 8; ++j, top += 8, bottom += 8, registers += 4) {
    if constexpr (direction == Direction::ToTile) {
      std::memcpy(top, registers, 8);
      std::memcpy(bottom, registers + 2, 8);
    } else {
      std::memcpy(registers, top, 8);
      std::memcpy(registers + 2, bottom, 8);
    }
  }
}

inline void poison(float* registers, u32 count) {
  for (u32 i = 0; i < count; ++i) std::memcpy(registers + i, &kPoison, 4);
}

inline bool is_poison(const float* registers, u32 count) {
  u32 different = 0;
  for (u32 i = 0; i < count; ++i) {
    u32 bits;
    std::memcpy(&bits, registers + i, 4);
    different |= bits ^ kPoison;
  }
  return different == 0;
}

// Objects that are used again instead of being freed.
template <class T>
class Pool {
 public:
  T* take() {
    if (free_.empty()) {
      all_.push_back(std::make_unique<T>());
      return all_.back().get();
    }
    T* item = free_.back();
    free_.pop_back();
    return item;
  }
  void give(T* item) { free_.push_back(item); }
  void give_all() {
    free_.clear();
    for (auto& item : all_) free_.push_back(item.get());
  }

 private:
  std::vector<std::unique_ptr<T>> all_;
  std::vector<T*> free_;
};

}  // namespace cki::sim
