// ldmatrix, stmatrix and movmatrix by one warp. Rows of 16 bytes are reached through a table of row numbers, so that
// a wrong use of a lane's address shows.
#include "common/types.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/movmatrix.cuh"
#include "ptx/stmatrix.cuh"

using namespace cki;

constexpr int kRows = 64, kWordsPerRow = 4;

// memory: 64 rows of 4 words; row_of_lane: 32 numbers; registers: 32 lanes x 4.
// loaded: 6 forms x 32 lanes x 4 words. stored: 6 forms x 64 rows x 4 words. moved: 32 words.
extern "C" __global__ void __launch_bounds__(32)
    matrices(const u32* memory, const int* row_of_lane, const u32* registers, u32* loaded, u32* stored, u32* moved) {
  __shared__ __align__(16) u32 tile[kRows * kWordsPerRow];
  const int lane = threadIdx.x;
  u32* row = tile + row_of_lane[lane] * kWordsPerRow;
  for (int i = lane; i < kRows * kWordsPerRow; i += 32) tile[i] = memory[i];
  __syncwarp();

  u32 x1[1], x2[2], x4[4];
  u32* out = loaded + lane * 4;
  ptx::ldmatrix_x1(x1, row);
  out[0] = x1[0];
  ptx::ldmatrix_x2(x2, row);
  for (int i = 0; i < 2; ++i) out[128 + i] = x2[i];
  ptx::ldmatrix_x4(x4, row);
  for (int i = 0; i < 4; ++i) out[256 + i] = x4[i];
  ptx::ldmatrix_x1_trans(x1, row);
  out[384] = x1[0];
  ptx::ldmatrix_x2_trans(x2, row);
  for (int i = 0; i < 2; ++i) out[512 + i] = x2[i];
  ptx::ldmatrix_x4_trans(x4, row);
  for (int i = 0; i < 4; ++i) out[640 + i] = x4[i];

  const u32 r1[1] = {registers[lane * 4]}, r2[2] = {registers[lane * 4], registers[lane * 4 + 1]};
  const u32 r4[4] = {registers[lane * 4], registers[lane * 4 + 1], registers[lane * 4 + 2], registers[lane * 4 + 3]};
  for (int form = 0; form < 6; ++form) {
    __syncwarp();
    for (int i = lane; i < kRows * kWordsPerRow; i += 32) tile[i] = 0xffffffffu;
    __syncwarp();
    switch (form) {
      case 0: ptx::stmatrix_x1(row, r1); break;
      case 1: ptx::stmatrix_x2(row, r2); break;
      case 2: ptx::stmatrix_x4(row, r4); break;
      case 3: ptx::stmatrix_x1_trans(row, r1); break;
      case 4: ptx::stmatrix_x2_trans(row, r2); break;
      default: ptx::stmatrix_x4_trans(row, r4); break;
    }
    __syncwarp();
    for (int i = lane; i < kRows * kWordsPerRow; i += 32) stored[form * kRows * kWordsPerRow + i] = tile[i];
  }
  moved[lane] = ptx::movmatrix_trans(registers[lane * 4]);
}
