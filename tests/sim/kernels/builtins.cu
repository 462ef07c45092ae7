// One value of each built-in, for comparison with Python.
struct Results {
  unsigned* u;
  float* f;
  int nu = 0, nf = 0;
  __device__ void put(unsigned x) { u[nu++] = x; }
  __device__ void put(float x) { f[nf++] = x; }
};

extern "C" __global__ void integers(unsigned* u, unsigned x) {
  Results r{u, nullptr};
  r.put(static_cast<unsigned>(__popc(x)));
  r.put(static_cast<unsigned>(__clz(static_cast<int>(x))));
  r.put(static_cast<unsigned>(__clz(0)));
  r.put(static_cast<unsigned>(__ffs(static_cast<int>(x))));
  r.put(static_cast<unsigned>(__ffs(0)));
  r.put(__brev(x));
  r.put(__umulhi(x, 0x87654321u));
  r.put(static_cast<unsigned>(__mulhi(static_cast<int>(x), -5)));
  r.put(__funnelshift_l(x, 0xa5a5a5a5u, 8));
  r.put(__funnelshift_r(x, 0xa5a5a5a5u, 8));
  r.put(__byte_perm(x, 0x76543210u, 0x7531u));
  r.put(__byte_perm(x, 0x76543210u, 0x888bu));
  r.put(static_cast<unsigned>(__dp4a(0x01ff02fe, 0x03040506, 7)));
  r.put(static_cast<unsigned>(max(-3, 2)) + min(5u, 9u));
  r.put(static_cast<unsigned>(__float2int_rn(2.5f)) + static_cast<unsigned>(__float2int_rn(3.5f)) * 16);
  r.put(static_cast<unsigned>(__float2int_rz(-2.9f)));
  r.put(static_cast<unsigned>(__float2int_rd(-2.1f)));
  r.put(static_cast<unsigned>(__float2int_ru(2.1f)));
  r.put(static_cast<unsigned>(__float2int_rn(1e20f)));
  r.put(__float2uint_rz(-1.0f));
  r.put(__float_as_uint(1.0f));
  r.put(static_cast<unsigned>(sizeof(float4)) + 256 * static_cast<unsigned>(alignof(float4)));
  r.put(static_cast<unsigned>(sizeof(uint2)) + 256 * static_cast<unsigned>(alignof(uint2)));
  r.put(static_cast<unsigned>(sizeof(float3)) + 256 * static_cast<unsigned>(alignof(float3)));
  const int4 v = make_int4(1, 2, 3, 4);
  r.put(static_cast<unsigned>(v.x + 10 * v.y + 100 * v.z + 1000 * v.w));
}

extern "C" __global__ void floats(float* f, float x) {
  Results r{nullptr, f};
  r.put(rsqrtf(x));
  r.put(erff(x));
  r.put(tanhf(x));
  r.put(__expf(x));
  r.put(__logf(x));
  r.put(exp2f(x));
  r.put(log2f(x));
  r.put(__fdividef(1.0f, x));
  r.put(__saturatef(x + 5.0f));
  r.put(__saturatef(-x));
  r.put(fmaf(x, x, -1.0f));
  r.put(__uint_as_float(0x40490fdbu));
  r.put(fmaxf(NAN, x));
  r.put(__fadd_rn(__fmul_rn(x, x), -1.0f));
  r.put(normcdff(x));
}

// Where each thread is, in three dimensions.
extern "C" __global__ void indices(unsigned* u) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  u[block * threads + thread] = block << 16 | threadIdx.z << 8 | threadIdx.y << 4 | threadIdx.x;
}

// Every block and thread adds to the same words.
extern "C" __global__ void atomics(int* i, unsigned* u, float* f, unsigned long long* q) {
  const int n = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(&i[0], 1);
  atomicSub(&i[1], 2);
  atomicMax(&i[2], n - 100);
  atomicMin(&i[3], 100 - n);
  atomicAnd(&u[0], ~(1u << n % 32));
  atomicOr(&u[1], 1u << n % 32);
  atomicXor(&u[2], static_cast<unsigned>(n));
  atomicInc(&u[3], 9);
  atomicAdd(&f[0], 0.5f);
  atomicAdd(&q[0], 1ull << 32);
  while (atomicCAS(&u[4], 0u, 1u) != 0) {
  }
  ++u[5];  // under the lock
  __threadfence();
  atomicExch(&u[4], 0u);
}

__device__ int device_variable = 3;
__constant__ float table[4] = {1.0f, 2.0f, 4.0f, 8.0f};

extern "C" __global__ void variables(float* f, const float* x) { f[0] = table[device_variable] + __ldg(x); }

extern "C" __global__ void asserts(int n) {
  assert(n == 1);
  if (n == 2) __trap();
}

// Two static arrays, an aligned one, and dynamic memory under two names.
extern "C" __global__ void shared_layout(unsigned* u) {
  __shared__ unsigned char odd[3];
  __shared__ __align__(128) float aligned[32];
  extern __shared__ __align__(1024) unsigned char smem[];
  extern __shared__ __align__(1024) float words[];
  if (threadIdx.x < 3) odd[threadIdx.x] = 1;
  aligned[threadIdx.x] = 1.0f;
  __syncthreads();
  u[0] = static_cast<unsigned>(__cvta_generic_to_shared(smem));
  u[1] = static_cast<unsigned>(reinterpret_cast<unsigned long long>(words) -
                               reinterpret_cast<unsigned long long>(smem));
  u[2] = static_cast<unsigned>(__cvta_generic_to_shared(aligned)) % 128;
  u[3] = static_cast<unsigned>(static_cast<unsigned char*>(__cvta_shared_to_generic(u[0] + 5)) - smem);
  smem[threadIdx.x] = odd[threadIdx.x % 3];
}
