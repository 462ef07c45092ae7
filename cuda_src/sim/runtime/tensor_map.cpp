// Encoding of tensor maps by the rules of cuTensorMapEncodeTiled (CUDA driver API), and the walk over a tile's rows.
#include "tensor_map.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

#include "report.h"

using namespace cki::sim;

namespace {

constexpr u64 kMagic = 0x70614d726f736e54;   // "TnsorMap"
constexpr int kPlainTypes = 10;              // those behind flush or round while they copy: not modelled
constexpr u8 kElementBytes[kPlainTypes] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
constexpr u32 kSwizzleBytes[] = {0, 32, 64, 128};

bool is_float(int data_type) {
  const auto type = static_cast<TensorType>(data_type);
  return type == TensorType::F16 || type == TensorType::F32 || type == TensorType::F64 || type == TensorType::Bf16;
}

// Collects the broken rules.
struct Complaints {
  std::string text;

  void unless(bool right, const char* format, ...) __attribute__((format(printf, 3, 4))) {
    if (right) return;
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (!text.empty()) text += '\n';
    text += line;
  }
};

}  // namespace

namespace cki::sim {

u32 TensorMapFields::rows() const {
  u32 product = 1;
  for (u32 i = 1; i < rank; ++i) product *= box[i];
  return product;
}

TensorMapFields read_tensor_map(const void* map, int rank, CallSite site) {
  TensorMapFields fields;
  std::memcpy(&fields, map, sizeof fields);
  if (fields.magic != kMagic) fatal(site, "%p holds no tensor map of the simulated device", map);
  if (fields.rank != rank) fatal(site, "a %d-D copy through a tensor map of rank %u", rank, fields.rank);
  return fields;
}

void check_coordinates(const TensorMapFields& map, const i32* coordinates, bool store, CallSite site) {
  if (i64{coordinates[0]} * map.element_bytes % 16) {
    fatal(site, "tensor copy at innermost coordinate %d of %u-byte elements: the offset must be a multiple of 16 bytes",
          coordinates[0], map.element_bytes);
  }
  for (u32 i = 0; store && i < map.rank; ++i) {
    if (coordinates[i] < 0)
      fatal(site, "tensor store at coordinate %d of dimension %u: stores take none below 0", coordinates[i], i);
  }
}

TileRow tile_row(const TensorMapFields& map, const i32* coordinates, u32 row, bool store) {
  i64 offset = 0;
  for (u32 i = 1; i < map.rank; ++i) {
    const i64 index = i64{coordinates[i]} + row % map.box[i];
    row /= map.box[i];
    if (index < 0 || index > map.last_index[i]) return {nullptr, 0, 0};
    offset += index * static_cast<i64>(map.stride[i - 1]);
  }
  const i64 size = map.element_bytes, first = coordinates[0] * size;
  i64 extent = (i64{map.last_index[0]} + 1) * size;
  if (store) extent = (extent + 15) / 16 * 16;
  const i64 begin = std::clamp<i64>(-first, 0, map.row_bytes()),
            end = std::clamp<i64>(extent - first, 0, map.row_bytes());
  if (begin >= end) return {nullptr, 0, 0};
  return {map.base + offset + first + begin, static_cast<u32>(begin), static_cast<u32>(end)};
}

}  // namespace cki::sim

extern "C" int cki_sim_tensor_map_encode_tiled(void* map, int data_type, unsigned rank, void* address,
                                               const std::uint64_t* extents, const std::uint64_t* strides,
                                               const unsigned* box, const unsigned* element_strides, int interleave,
                                               int swizzle, int, int oob_fill, char* error, unsigned error_bytes) {
  Complaints complaints;
  const bool type_known = data_type >= 0 && data_type < kPlainTypes;
  complaints.unless(reinterpret_cast<std::uintptr_t>(map) % 64 == 0, "map: %p is not a multiple of 64", map);
  complaints.unless(type_known, "data_type %d: the simulated device has 0..%d", data_type, kPlainTypes - 1);
  complaints.unless(rank >= 1 && rank <= kMaxTensorRank, "rank %u: must be 1..5", rank);
  complaints.unless(reinterpret_cast<std::uintptr_t>(address) % 16 == 0, "address %p: must be a multiple of 16",
                    address);
  complaints.unless(interleave == 0, "interleave %d: the simulated device has none (0)", interleave);
  complaints.unless(swizzle >= 0 && swizzle <= 3, "swizzle %d: must be none, 32, 64 or 128 bytes (0..3)", swizzle);
  complaints.unless(oob_fill == 0 || (oob_fill == 1 && is_float(data_type)), "oob_fill %d: 0, or 1 for floating types",
                    oob_fill);
  if (complaints.text.empty()) {
    const u64 element_bytes = kElementBytes[data_type], row = element_bytes * box[0], span = kSwizzleBytes[swizzle];
    for (u32 i = 0; i < rank; ++i) {
      complaints.unless(extents[i] >= 1 && extents[i] <= u64{1} << 32, "extent[%u] %llu: must be 1..2^32", i,
                        static_cast<unsigned long long>(extents[i]));
      complaints.unless(box[i] >= 1 && box[i] <= 256, "box[%u] %u: must be 1..256", i, box[i]);
      complaints.unless(element_strides[i] == 1, "element_stride[%u] %u: the simulated device has 1 only", i,
                        element_strides[i]);
    }
    for (u32 i = 0; i + 1 < rank; ++i) {
      complaints.unless(strides[i] % 16 == 0 && strides[i] < u64{1} << 40,
                        "stride[%u] %llu bytes: must be a multiple of 16 and below 2^40", i,
                        static_cast<unsigned long long>(strides[i]));
    }
    complaints.unless(row % 16 == 0, "box[0] %u elements of %llu bytes: their product must be a multiple of 16", box[0],
                      static_cast<unsigned long long>(element_bytes));
    complaints.unless(span == 0 || row <= span, "box[0] %u elements are %llu bytes: beyond the swizzle's %llu", box[0],
                      static_cast<unsigned long long>(row), static_cast<unsigned long long>(span));
  }
  if (!complaints.text.empty()) {
    if (error_bytes) std::snprintf(error, error_bytes, "%s", complaints.text.c_str());
    return 1;
  }
  TensorMapFields fields{};
  fields.magic = kMagic;
  fields.base = static_cast<u8*>(address);
  fields.rank = static_cast<u8>(rank);
  fields.element_bytes = kElementBytes[data_type];
  fields.swizzle_bytes = static_cast<u8>(kSwizzleBytes[swizzle]);
  fields.data_type = static_cast<u8>(data_type);
  fields.fill_nan = oob_fill == 1;
  for (u32 i = 0; i < rank; ++i) {
    fields.last_index[i] = static_cast<u32>(extents[i] - 1);
    fields.box[i] = static_cast<u16>(box[i]);
    if (i) fields.stride[i - 1] = strides[i - 1];
  }
  std::memset(map, 0, 128);
  std::memcpy(map, &fields, sizeof fields);
  return 0;
}
