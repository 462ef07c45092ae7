// Fixed-width integers and the storage types of every element format.
//
// f16, bf16, e4m3 and e5m2 are plain bit containers: they have no arithmetic and no implicit conversion, so that a
// kernel states each conversion (ptx/convert.cuh) and nothing is rounded unseen. The header needs no CUDA toolkit
// header, because NVRTC then compiles a kernel three times faster and the simulated device compiles the same text
// with the host compiler.
#pragma once

namespace cki {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;

// IEEE 754 binary16: 1 sign, 5 exponent, 10 mantissa bits.
struct f16 {
  u16 bits;
};

// bfloat16: the upper half of a binary32.
struct bf16 {
  u16 bits;
};

// FP8 E4M3 (OCP "E4M3FN"): bias 7, largest 448, no infinity, NaN is S.1111.111.
struct e4m3 {
  u8 bits;
};

// FP8 E5M2 (OCP): bias 15, largest 57344, infinity and NaN as in IEEE 754.
struct e5m2 {
  u8 bits;
};

// A CUtensorMap: opaque to the kernel. A parameter is declared `const __grid_constant__ TensorMap`. 128-byte alignment
// satisfies CUDA 12 (64) and CUDA 13 (128).
struct alignas(128) TensorMap {
  u64 opaque[16];
};

static_assert(sizeof(u8) == 1 && sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(i64) == 8);
static_assert(sizeof(f16) == 2 && sizeof(bf16) == 2 && sizeof(e4m3) == 1 && sizeof(e5m2) == 1 &&
              sizeof(TensorMap) == 128);

}  // namespace cki
