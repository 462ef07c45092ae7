// What orders memory and what does not. `fault` 0 is right.

// Neighbouring bytes and halves belong to different threads: no race.
extern "C" __global__ void neighbours(unsigned char* y) {
  __shared__ unsigned char bytes[64];
  __shared__ unsigned short halves[64];
  const int t = static_cast<int>(threadIdx.x);
  for (int round = 0; round < 3; ++round) {
    bytes[t] = static_cast<unsigned char>(t + round);
    halves[t] = static_cast<unsigned short>(2 * t);
    y[t] = static_cast<unsigned char>(bytes[t] + halves[t]);
  }
  __syncthreads();
  const unsigned word = *reinterpret_cast<unsigned*>(&bytes[t / 4 * 4]);
  y[t] = static_cast<unsigned char>(y[t] + (word >> 8 * (t % 4) & 255));
}

// A counter that all add to; read plainly after a barrier, or (fault 1) without one.
extern "C" __global__ void counter(int* y, int fault) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 1);  // add
  if (fault != 1) __syncthreads();
  y[threadIdx.x] = count;  // read count
}

// Message passing between warps. fault 1: no fence at the writer; fault 2: none at the reader.
extern "C" __global__ void message(int* y, int fault) {
  __shared__ int data, flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    data = 42;  // write data
    if (fault != 1) __threadfence_block();
    atomicExch(&flag, 1);
  } else if (threadIdx.x == 32) {
    while (atomicAdd(&flag, 0) == 0) {
    }
    if (fault != 2) __threadfence_block();
    *y = data;  // read data
  }
}

// The same with a volatile flag, which counts as a relaxed atomic.
extern "C" __global__ void volatile_message(int* y, int fault) {
  __shared__ int data;
  __shared__ volatile int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    data = 42;
    if (fault != 1) __threadfence_block();
    flag = 1;
  } else if (threadIdx.x == 32) {
    while (flag == 0) __nanosleep(20);
    if (fault != 1) __threadfence_block();
    *y = data;
  }
}

// All read what one has written; it writes again after a barrier, or (fault 1) at once.
extern "C" __global__ void broadcast(int* y, int fault) {
  __shared__ int value;
  int total = 0;
  for (int round = 0; round < 4; ++round) {
    if (threadIdx.x == 0) value = round;  // broadcast
    __syncthreads();
    total += value;  // use
    if (fault != 1) __syncthreads();
  }
  y[threadIdx.x] = total;
}

// An order that the seed alone decides: who comes first.
extern "C" __global__ void order(int* y) {
  __shared__ int next;
  if (threadIdx.x == 0) next = 0;
  __syncthreads();
  y[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(&next, 1);
}
