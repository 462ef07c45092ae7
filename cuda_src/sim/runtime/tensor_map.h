// The simulated device's tensor map: the same 128 opaque bytes as a CUtensorMap, with contents of its own.
#pragma once
#include "types.h"

namespace cki::sim {

constexpr u32 kMaxTensorRank = 5;

struct TensorMapFields {
  u64 magic;
  u8* base;
  u64 stride[kMaxTensorRank - 1];      // bytes, of dimensions 1..
  u32 last_index[kMaxTensorRank];      // extent - 1, because an extent may be 2^32
  u16 box[kMaxTensorRank];             // elements
  u8 rank, element_bytes, swizzle_bytes, data_type;
  bool fill_nan;

  u32 row_bytes() const { return u32{box[0]} * element_bytes; }
  u32 rows() const;
  u32 tile_bytes() const { return row_bytes() * rows(); }                             // what the barrier counts
  // A row narrower than the swizzle leaves the rest of its span untouched (seen on an H200).
  u32 row_pitch() const { return swizzle_bytes ? swizzle_bytes : row_bytes(); }
  u32 footprint() const { return row_pitch() * rows(); }                              // in shared memory
};
static_assert(sizeof(TensorMapFields) <= 128);

// CUtensorMapDataType
enum class TensorType : u8 { U8, U16, U32, I32, U64, I64, F16, F32, F64, Bf16, F32Ftz, Tf32, Tf32Ftz };

// Addition of one element to global memory, atomically: what reducing bulk copies do (memory.cpp).
// Both pointers are aligned to the element. Types: 32- and 64-bit integers, f16, bf16, f32, f64.
void add_to_global(TensorType type, u8* global, const u8* value);
bool can_add(TensorType type);

// A copy of the map at `map`; fatal when it is not one of this rank.
TensorMapFields read_tensor_map(const void* map, int rank, CallSite site);

// One row of the box (all elements along dimension 0) in global memory.
struct TileRow {
  u8* global;             // of the row's first element inside the tensor; null when the whole row lies outside
  u32 begin, end;         // the bytes of the row that lie inside
};

// Row `row` of the box at `coordinates`. Loads are clipped to the element; stores write whole units of 16 bytes, that
// is, up to 15 bytes behind the innermost extent (seen on an H200).
TileRow tile_row(const TensorMapFields& map, const i32* coordinates, u32 row, bool store);

// Coordinates that the hardware refuses as an illegal instruction: an innermost one that is no multiple of 16 bytes,
// and a negative one of a store.
void check_coordinates(const TensorMapFields& map, const i32* coordinates, bool store, CallSite site);

}  // namespace cki::sim

extern "C" {
// cuTensorMapEncodeTiled for the simulated device: the same arguments, by the driver's enumerations. Returns 0, or 1
// with every broken rule in `error`, one a line.
int cki_sim_tensor_map_encode_tiled(void* map, int data_type, unsigned rank, void* address,
                                    const std::uint64_t* extents, const std::uint64_t* strides, const unsigned* box,
                                    const unsigned* element_strides, int interleave, int swizzle, int l2_promotion,
                                    int oob_fill, char* error, unsigned error_bytes);
}
