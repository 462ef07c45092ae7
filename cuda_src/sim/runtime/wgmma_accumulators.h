// The accumulators of wgmma products in flight: a tile of 64xN fp32 for a warpgroup, and their way from and to the
// threads' registers. While they are in flight, adversarial mode keeps a signalling NaN in the registers: arithmetic
// changes its bits.
#pragma once
#include <cstring>
#include <memory>
#include <vector>

#include "types.h"

namespace cki::sim {

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
