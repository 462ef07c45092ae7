// Warp-wide functions and barriers: every result is written out for comparison with Python.

// y[operation][lane] for one warp.
extern "C" __global__ void shuffles(int* y, int width) {
  const int lane = static_cast<int>(threadIdx.x);
  const unsigned all = 0xffffffffu;
  const int value = 100 + lane;
  y[0 * 32 + lane] = __shfl_sync(all, value, lane * 5, width);
  y[1 * 32 + lane] = __shfl_up_sync(all, value, 3, width);
  y[2 * 32 + lane] = __shfl_down_sync(all, value, 3, width);
  y[3 * 32 + lane] = __shfl_xor_sync(all, value, 5, width);
  y[4 * 32 + lane] = static_cast<int>(__shfl_sync(all, 0x100000000ll * value, 7) >> 32);
  y[5 * 32 + lane] = static_cast<int>(__shfl_xor_sync(all, 0.5f * static_cast<float>(value), 1) * 2.0f);
}

extern "C" __global__ void votes(unsigned* y) {
  const unsigned lane = threadIdx.x, all = 0xffffffffu;
  const int sign = static_cast<int>(lane) - 16;
  int equal = -1;
  y[0 * 32 + lane] = __ballot_sync(all, lane % 3 == 0);
  y[1 * 32 + lane] = static_cast<unsigned>(__any_sync(all, lane == 7)) + 2u * static_cast<unsigned>(__all_sync(all, lane < 32));
  y[2 * 32 + lane] = static_cast<unsigned>(__any_sync(all, lane == 40)) + 2u * static_cast<unsigned>(__all_sync(all, lane < 31));
  y[3 * 32 + lane] = __match_any_sync(all, lane % 5);
  y[4 * 32 + lane] = __match_all_sync(all, 3.0f, &equal) + static_cast<unsigned>(equal);
  y[5 * 32 + lane] = __match_all_sync(all, lane / 31, &equal) + static_cast<unsigned>(equal);
  y[6 * 32 + lane] = __reduce_add_sync(all, lane);
  y[7 * 32 + lane] = static_cast<unsigned>(__reduce_min_sync(all, sign));
  y[8 * 32 + lane] = static_cast<unsigned>(__reduce_max_sync(all, sign));
  y[9 * 32 + lane] = __reduce_max_sync(all, static_cast<unsigned>(sign));
  y[10 * 32 + lane] = __reduce_and_sync(all, lane | 4u) + 1000u * __reduce_or_sync(all, lane) + 100000u * __reduce_xor_sync(all, lane + 1);
  y[11 * 32 + lane] = __activemask() >> lane & 1u;
}

// Half a warp returns early; the others go on with masks that name it, and the last warp has only 8 lanes.
extern "C" __global__ void partial(int* y) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  y[thread] = -1;
  if (thread < 32 && lane >= 16) return;
  int total = lane;
  for (int offset = 8; offset; offset >>= 1) {
    const int other = __shfl_xor_sync(0xffffffffu, total, offset, 16);
    if (thread < 32 || (lane ^ offset) < 8) total += other;
  }
  y[thread] = total;
}

// A shuffle from a lane outside the mask is undefined.
extern "C" __global__ void outside(unsigned* y) {
  const unsigned lane = threadIdx.x;
  if (lane < 4) y[lane] = __shfl_sync(0xfu, lane, 4 + static_cast<int>(lane));
}

extern "C" __global__ void block_votes(int* y) {
  const int thread = static_cast<int>(threadIdx.x);
  const int some = __syncthreads_or(thread == 77), none = __syncthreads_or(0);
  const int every = __syncthreads_and(thread < 96), not_every = __syncthreads_and(thread != 5);
  const int count = __syncthreads_count(thread % 3 == 0);
  y[thread] = (some != 0) + 2 * (none != 0) + 4 * (every != 0) + 8 * (not_every != 0) + 16 * count;
}

// Two named barriers between a producing and a consuming half, round after round over one buffer.
extern "C" __global__ void producer_consumer(float* y, int rounds, int fault) {
  __shared__ float buffer[64];
  const int thread = static_cast<int>(threadIdx.x), i = thread % 64;
  if (thread < 64) {
    for (int round = 0; round < rounds; ++round) {
      if (round > 0 && fault != 1) cki_sim_bar_sync(2, 128);  // wait for empty
      buffer[i] = static_cast<float>(round * 64 + i);         // produce
      if (fault == 2) __syncwarp();
      cki_sim_bar_arrive(1, 128);  // full
    }
  } else {
    float total = 0.0f;
    for (int round = 0; round < rounds; ++round) {
      cki_sim_bar_sync(1, 128);  // wait for full
      total += buffer[63 - i];   // consume
      if (round + 1 < rounds && fault != 1) cki_sim_bar_arrive(2, 128);  // empty
    }
    y[i] = total;
  }
}

// Threads leave one after the other; __syncthreads counts those that are left.
extern "C" __global__ void early_exit(int* y) {
  const int thread = static_cast<int>(threadIdx.x);
  int round = 0;
  for (; round < thread / 32; ++round) __syncthreads();
  y[thread] = round;
}
