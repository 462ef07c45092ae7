// Tiled copies through tensor maps: 1-D to 5-D loads, stores and additions, with swizzle and clipping at the tensor's
// edges.
#include <algorithm>
#include <cstring>

#include "bounds.h"
#include "bulk.h"
#include "convert.h"
#include "scheduler.h"
#include "tensor_map.h"

using namespace cki::sim;

namespace {

constexpr u32 kTileAlignment = 128;
constexpr u32 kMaxRowBytes = 256 * 8;

struct Coordinates {
  i32 c[kMaxTensorRank];
};

Coordinates coordinates_of(const int* c, int rank) {
  Coordinates result{};
  std::copy(c, c + rank, result.c);
  return result;
}

// Elements outside the tensor read as zero, or as the format's NaN when the map says so.
void fill_outside(const TensorMapFields& map, u8* row) {
  const u32 bytes = map.row_bytes();
  if (!map.fill_nan) {
    std::memset(row, 0, bytes);
    return;
  }
  u8 nan[8] = {0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff, 0x7f};
  if (map.element_bytes == 2) nan[1] = nan[3] = nan[5] = nan[7] = 0x7f;
  for (u32 i = 0; i < bytes; ++i) row[i] = nan[i % 8];
}

void load_tile(const TensorMapFields& map, const Coordinates& at, const SharedPlace& target) {
  alignas(16) u8 row[kMaxRowBytes];
  const u32 bytes = map.row_bytes(), rows = map.rows();
  u8* window = target.block->window.base;
  u32 address = target.offset + kSharedBase;
  for (u32 r = 0; r < rows; ++r, address += map.row_pitch()) {
    const TileRow inside = tile_row(map, at.c, r, false);
    if (inside.end - inside.begin < bytes) fill_outside(map, row);
    if (inside.global) std::memcpy(row + inside.begin, inside.global, inside.end - inside.begin);
    for (u32 chunk = 0; chunk < bytes; chunk += 16) {
      std::memcpy(window + (swizzled(map.swizzle_bytes, address + chunk) - kSharedBase), row + chunk, 16);
    }
  }
}

// `tile` holds the bytes that lay at shared address `address`, still swizzled.
void store_tile(const TensorMapFields& map, const Coordinates& at, const u8* tile, u32 address, bool add) {
  alignas(16) u8 row[kMaxRowBytes];
  const u32 bytes = map.row_bytes(), rows = map.rows();
  for (u32 r = 0; r < rows; ++r) {
    const TileRow inside = tile_row(map, at.c, r, true);
    if (!inside.global) continue;
    for (u32 chunk = 0; chunk < bytes; chunk += 16) {
      std::memcpy(row + chunk, tile + (swizzled(map.swizzle_bytes, address + r * map.row_pitch() + chunk) - address), 16);
    }
    if (!add) {
      std::memcpy(inside.global, row + inside.begin, inside.end - inside.begin);
      continue;
    }
    for (u32 i = inside.begin; i < inside.end; i += map.element_bytes) {
      add_to_global(static_cast<TensorType>(map.data_type), inside.global + (i - inside.begin), row + i);
    }
  }
}

void check_bounds(const TensorMapFields& map, const Coordinates& at, bool write, CallSite site) {
  if (!current_group().checks.bounds) return;
  for (u32 r = 0; r < map.rows(); ++r) {
    const TileRow inside = tile_row(map, at.c, r, write);
    if (inside.global) check_global(inside.global, inside.end - inside.begin, write, site);
  }
}

}  // namespace

extern "C" void cki_sim_tma_load(void* shared, const void* map_pointer, void* barrier, int rank, const int* c,
                                 unsigned cta_mask) {
  CallSite site = CKI_SIM_CALL_SITE;
  const TensorMapFields map = read_tensor_map(map_pointer, rank, site);
  const Coordinates at = coordinates_of(c, rank);
  check_coordinates(map, at.c, false, site);
  check_bounds(map, at, false, site);
  issue_bulk_load({shared, barrier, map.footprint(), map.tile_bytes(), kTileAlignment, cta_mask,
                   [map, at](const SharedPlace& target) { load_tile(map, at, target); }},
                  site);
}

extern "C" void cki_sim_tma_store(const void* map_pointer, const void* shared, int rank, const int* c, int add) {
  CallSite site = CKI_SIM_CALL_SITE;
  const TensorMapFields map = read_tensor_map(map_pointer, rank, site);
  const Coordinates at = coordinates_of(c, rank);
  if (add && !can_add(static_cast<TensorType>(map.data_type))) {
    fatal(site, "tensor reduction: data type %u has no addition", map.data_type);
  }
  check_coordinates(map, at.c, true, site);
  check_bounds(map, at, true, site);
  issue_bulk_store({shared, map.footprint(), kTileAlignment,
                    [map, at, add](const u8* tile, u32 address) { store_tile(map, at, tile, address, add != 0); }},
                   site);
}

extern "C" void cki_sim_prefetch_tensormap(const void* map) {
  CallSite site = CKI_SIM_CALL_SITE;
  TensorMapFields fields;
  std::memcpy(&fields, map, sizeof fields);
  read_tensor_map(map, fields.rank, site);
}
