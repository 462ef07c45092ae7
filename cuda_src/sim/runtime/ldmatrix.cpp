// ldmatrix, stmatrix and movmatrix: 8x8 matrices of 16-bit elements between shared memory and the registers of a warp.
//
// Element (row r, column c) of a matrix lies with lane 4r + c/2 in the half c%2 of its register; transposed, with lane
// 4c + r/2 in the half r%2. Lane 8i + r supplies the address of row r of matrix i.
#include <cstring>

#include "engine.h"
#include "race.h"
#include "scheduler.h"
#include "warp.h"

using namespace cki::sim;

namespace {

struct Arguments {
  u32* registers;
  u8* row;              // null in lanes whose address is not used
};

constexpr u32 kRowBytes = 16;

// The row that this lane supplies, checked; null when the operation does not read its address.
u8* row_of_lane(Thread& thread, const void* pointer, u32 matrices, CallSite site, const char* name) {
  if (thread.lane() >= 8 * matrices) return nullptr;
  const u32 address = shared_address(pointer, site);
  if (address % kRowBytes) fatal(site, "%s: row address 0x%x is not a multiple of 16", name, address);
  return shared_pointer(address, kRowBytes, site);
}

SharedPlace place_of(Block& block, u8* pointer) { return {&block, block.window.offset(pointer), pointer}; }

void load_matrices(Thread& last, WarpOperation& operation) {
  const u32 matrices = operation.argument[last.lane()] & 7;
  const bool transpose = operation.argument[last.lane()] & 8;
  RaceDetector* races = detector();
  for (u32 i = 0; i < matrices; ++i) {
    u16 element[8][8];
    for (u32 r = 0; r < 8; ++r) {
      u8* row = static_cast<Arguments*>(operation.pointer[8 * i + r])->row;
      std::memcpy(element[r], row, kRowBytes);
      if (races) races->read(place_of(*last.block, row), kRowBytes, operation.site, "ldmatrix reads");
    }
    for (u32 lane = 0; lane < kWarpSize; ++lane) {
      const u32 major = lane / 4, minor = lane % 4 * 2;
      const u32 low = transpose ? element[minor][major] : element[major][minor];
      const u32 high = transpose ? element[minor + 1][major] : element[major][minor + 1];
      static_cast<Arguments*>(operation.pointer[lane])->registers[i] = low | high << 16;
    }
  }
}

void store_matrices(Thread& last, WarpOperation& operation) {
  const u32 matrices = operation.argument[last.lane()] & 7;
  const bool transpose = operation.argument[last.lane()] & 8;
  RaceDetector* races = detector();
  for (u32 i = 0; i < matrices; ++i) {
    u16 element[8][8];
    for (u32 lane = 0; lane < kWarpSize; ++lane) {
      const u32 major = lane / 4, minor = lane % 4 * 2;
      const u32 pair = static_cast<Arguments*>(operation.pointer[lane])->registers[i];
      (transpose ? element[minor][major] : element[major][minor]) = static_cast<u16>(pair);
      (transpose ? element[minor + 1][major] : element[major][minor + 1]) = static_cast<u16>(pair >> 16);
    }
    for (u32 r = 0; r < 8; ++r) {
      u8* row = static_cast<Arguments*>(operation.pointer[8 * i + r])->row;
      if (races) races->write(place_of(*last.block, row), kRowBytes, operation.site, "stmatrix writes");
      std::memcpy(row, element[r], kRowBytes);
    }
  }
}

void transpose_matrix(Thread&, WarpOperation& operation) {
  u16 element[8][8];
  for (u32 lane = 0; lane < kWarpSize; ++lane) {
    const u32 pair = *static_cast<u32*>(operation.pointer[lane]);
    element[lane / 4][lane % 4 * 2] = static_cast<u16>(pair);
    element[lane / 4][lane % 4 * 2 + 1] = static_cast<u16>(pair >> 16);
  }
  for (u32 lane = 0; lane < kWarpSize; ++lane) {
    const u32 row = lane % 4 * 2, column = lane / 4;
    *static_cast<u32*>(operation.pointer[lane]) = element[row][column] | static_cast<u32>(element[row + 1][column])
                                                                             << 16;
  }
}

}  // namespace

extern "C" void cki_sim_ldmatrix(unsigned* registers, int matrices, int transpose, const void* row_pointer) {
  CallSite site = CKI_SIM_CALL_SITE;
  Thread& thread = current_thread();
  Block& block = *thread.block;
  Arguments arguments{registers, row_of_lane(thread, row_pointer, static_cast<u32>(matrices), site, "ldmatrix")};
  if (arguments.row) {
    const u32 offset = block.window.offset(arguments.row);
    if (block.in_flight.find_write(offset, kRowBytes) >= 0) {
      hazard(site, "ldmatrix reads shared 0x%x, the target of a copy in flight", offset + kSharedBase);
    }
    // Each lane reads its own row here, and the last lane all rows: whoever overwrites a row must be ordered after
    // both.
    if (RaceDetector* races = detector())
      races->read(place_of(block, arguments.row), kRowBytes, site, "ldmatrix reads");
  }
  const u32 shape = static_cast<u32>(matrices) | static_cast<u32>(transpose) << 3;
  warp_rendezvous(site, kLdmatrix + static_cast<int>(shape), "ldmatrix", kFullWarp, 0, shape, &arguments,
                  load_matrices);
}

extern "C" void cki_sim_stmatrix(void* row_pointer, int matrices, int transpose, const unsigned* registers) {
  CallSite site = CKI_SIM_CALL_SITE;
  Thread& thread = current_thread();
  Block& block = *thread.block;
  Arguments arguments{const_cast<u32*>(registers),
                      row_of_lane(thread, row_pointer, static_cast<u32>(matrices), site, "stmatrix")};
  if (arguments.row) {
    const u32 offset = block.window.offset(arguments.row);
    if (block.in_flight.find_write(offset, kRowBytes) >= 0) {
      hazard(site, "stmatrix writes shared 0x%x, the target of a copy in flight", offset + kSharedBase);
    }
    if (block.in_flight.find_read(offset, kRowBytes) >= 0) {
      hazard(site, "stmatrix writes shared 0x%x, which an operation in flight still reads", offset + kSharedBase);
    }
  }
  const u32 shape = static_cast<u32>(matrices) | static_cast<u32>(transpose) << 3;
  warp_rendezvous(site, kStmatrix + static_cast<int>(shape), "stmatrix", kFullWarp, 0, shape, &arguments,
                  store_matrices);
}

extern "C" unsigned cki_sim_movmatrix_trans(unsigned a) {
  warp_rendezvous(CKI_SIM_CALL_SITE, kMovmatrix, "movmatrix", kFullWarp, 0, 0, &a, transpose_matrix);
  return a;
}
