// Values of e4m3 as the second product of attention reads them: keys contiguous, in the order of the weights' registers.
//
//   v [batch, keys, kv_heads, value_dim] by strides -> transposed [batch, kv_heads, value_dim, padded_keys]
//
// wgmma takes 8-bit operands K-major only, so the rows of V, which P V sums over, must be what lies side by side. A lane of
// the first product holds of every 16 keys the pairs 2t, 2t + 1 and 8 + 2t, 8 + 2t + 1 of a row (t = lane % 4), where the
// left operand of the second wants four neighbours, 4t to 4t + 3. Sums do not mind the order: place 16 g + 4 t + e holds key
// 16 g + 8 (e / 2) + 2 t + e % 2, and the weights are packed where they are (products_e4m3.cuh). Places past the last key
// hold zeros, for a weight of zero does not hide a NaN.
//
// One launch before the attention: each key is turned once, where each block of query rows would turn all of them again, in
// shared memory that its products need. Two bytes move for each byte of V; the dynamic schedule's counter (scheduler.cuh)
// is zeroed here too, so that this launch is the one that reset_counter.cu would be.
//
// A block turns 128 keys of 128 columns. A lane takes 4 keys of 4 columns, four words, and permutes their bytes; the words of
// a key lie in shared memory at (word ^ lane that takes the key), so that neither side of the turn meets bank conflicts
// where it reads.
#include "common/types.cuh"
#include "ptx/grid_dependency.cuh"

using namespace cki;

constexpr int kThreads = 256;
constexpr int kTileKeys = 128;
constexpr int kTileColumns = 128;
constexpr int kRowWords = kTileColumns / 4;
constexpr int kRowPieces = kTileColumns / 16;

// The lane that takes a key: which of the 32 quads of places it belongs to.
__device__ __forceinline__ int lane_of(int key) { return key / 16 * 4 + key % 8 / 2; }

// value_dim: a multiple of 16, as are strides and addresses. padded_keys: a multiple of kTileKeys.
extern "C" __global__ void __launch_bounds__(kThreads)
    transpose_e4m3_values(const e4m3* __restrict__ v, u32* __restrict__ transposed, u32* counter, i64 v_batch,
                          i64 v_sequence, i64 v_head, int keys, int kv_heads, int value_dim, int column_tiles,
                          int key_tiles) {
  __shared__ __align__(16) u32 tile[kTileKeys * kRowWords];
  ptx::griddepcontrol_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x);
  int number = static_cast<int>(blockIdx.x);
  if (number == 0 && thread == 0 && counter != nullptr) *counter = 0;
  // Heads fastest: blocks that run together read whole rows of all heads.
  const int head = number % kv_heads;
  number /= kv_heads;
  const int column_tile = number % column_tiles;
  number /= column_tiles;
  const int key_tile = number % key_tiles, batch = number / key_tiles;

  const int piece = thread % kRowPieces, column = column_tile * kTileColumns + piece * 16;
  const e4m3* source = v + batch * v_batch + head * v_head + column;
  constexpr int kTrips = kTileKeys * kRowPieces / kThreads;
  uint4 loaded[kTrips];
#pragma unroll
  for (int trip = 0; trip < kTrips; ++trip) {
    const int key = key_tile * kTileKeys + thread / kRowPieces + trip * (kThreads / kRowPieces);
    loaded[trip] = make_uint4(0, 0, 0, 0);
    if (key < keys && column < value_dim) loaded[trip] = *reinterpret_cast<const uint4*>(source + key * v_sequence);
  }
#pragma unroll
  for (int trip = 0; trip < kTrips; ++trip) {
    const int key = thread / kRowPieces + trip * (kThreads / kRowPieces);
    u32* row = tile + key * kRowWords;
    const int taker = lane_of(key);
    row[(piece * 4) ^ taker] = loaded[trip].x;
    row[(piece * 4 + 1) ^ taker] = loaded[trip].y;
    row[(piece * 4 + 2) ^ taker] = loaded[trip].z;
    row[(piece * 4 + 3) ^ taker] = loaded[trip].w;
  }
  __syncthreads();

  const int warp = thread / 32, lane = thread % 32;
  const int first_key = lane / 4 * 16 + lane % 4 * 2;
  const i64 row_words = static_cast<i64>(key_tiles) * (kTileKeys / 4);
  u32* target = transposed + (static_cast<i64>(batch) * kv_heads + head) * value_dim * row_words +
                key_tile * (kTileKeys / 4) + lane;
#pragma unroll
  for (int word = warp; word < kRowWords; word += kThreads / 32) {
    const int first_column = column_tile * kTileColumns + word * 4;
    if (first_column >= value_dim) break;
    u32 keys_of[4];  // four columns of keys first, first + 1, first + 8, first + 9
#pragma unroll
    for (int i = 0; i < 4; ++i) keys_of[i] = tile[(first_key + i / 2 * 8 + i % 2) * kRowWords + (word ^ lane)];
    // Columns 0 and 1, then 2 and 3, of the first two keys and of the last two.
    const u32 low_first = __byte_perm(keys_of[0], keys_of[1], 0x5140);
    const u32 low_last = __byte_perm(keys_of[2], keys_of[3], 0x5140);
    const u32 high_first = __byte_perm(keys_of[0], keys_of[1], 0x7362);
    const u32 high_last = __byte_perm(keys_of[2], keys_of[3], 0x7362);
    u32* p = target + first_column * row_words;
    p[0] = __byte_perm(low_first, low_last, 0x5410);
    p[row_words] = __byte_perm(low_first, low_last, 0x7632);
    p[2 * row_words] = __byte_perm(high_first, high_last, 0x5410);
    p[3 * row_words] = __byte_perm(high_first, high_last, 0x7632);
  }
}
