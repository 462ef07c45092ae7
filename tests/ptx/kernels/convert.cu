// Every conversion of ptx/convert.cuh, one thread an input.
#include "common/types.cuh"
#include "ptx/convert.cuh"

using namespace cki;

// x: n floats. Narrow results of (x[i], x[n-1-i]); 16-bit inputs are the low bits of i.
extern "C" __global__ void __launch_bounds__(256)
    convert(const float* x, int n, u16* to_f16, u16* to_bf16, u32* to_f16x2, u32* to_bf16x2, u16* to_e4m3x2,
            u16* to_e5m2x2, u32* to_tf32, u32* from_f16, u32* from_bf16, u32* from_f16x2, u32* from_bf16x2,
            u32* from_e4m3x2, u32* from_e5m2x2) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float lo = x[i], hi = x[n - 1 - i];
  to_f16[i] = ptx::f32_to_f16(lo).bits;
  to_bf16[i] = ptx::f32_to_bf16(lo).bits;
  to_f16x2[i] = ptx::f32x2_to_f16x2(lo, hi);
  to_bf16x2[i] = ptx::f32x2_to_bf16x2(lo, hi);
  to_e4m3x2[i] = ptx::f32x2_to_e4m3x2(lo, hi);
  to_e5m2x2[i] = ptx::f32x2_to_e5m2x2(lo, hi);
  to_tf32[i] = ptx::f32_to_tf32(lo);
  const u16 bits = static_cast<u16>(i);
  const u32 pair = bits | static_cast<u32>(static_cast<u16>(~bits)) << 16;
  from_f16[i] = __float_as_uint(ptx::f16_to_f32(f16{bits}));
  from_bf16[i] = __float_as_uint(ptx::bf16_to_f32(bf16{bits}));
  float a, b;
  ptx::f16x2_to_f32x2(pair, a, b);
  from_f16x2[2 * i] = __float_as_uint(a);
  from_f16x2[2 * i + 1] = __float_as_uint(b);
  ptx::bf16x2_to_f32x2(pair, a, b);
  from_bf16x2[2 * i] = __float_as_uint(a);
  from_bf16x2[2 * i + 1] = __float_as_uint(b);
  from_e4m3x2[i] = ptx::e4m3x2_to_f16x2(bits);
  from_e5m2x2[i] = ptx::e5m2x2_to_f16x2(bits);
}
