// mma.sync: D[16x8] = A[16xK] B[Kx8] + C by a warp, with fp32 accumulation in order of k.
//
// The last lane to arrive gathers the fragments of all lanes into fp32 matrices, multiplies, and scatters D. The
// hardware adds in its own order and width, so results agree with it within a bound and not to the bit. Lane l = 4g +
// t holds the fragments that cuda_src/ptx/mma.cuh lists.
#include "convert.h"
#include "engine.h"
#include "matrix_block.h"
#include "scheduler.h"
#include "warp.h"

using namespace cki::sim;

namespace {

constexpr u32 kM = 16, kN = 8;

struct Fragments {
  float* d;
  const u32* a;
  const u32* b;
  const float* c;
};

struct F16 {
  static constexpr u32 kK = 16, kPerRegister = 2;
  static float element(u32 bits, u32 i) { return f16_bits_to_f32(static_cast<u16>(bits >> 16 * i)); }
};

struct Bf16 {
  static constexpr u32 kK = 16, kPerRegister = 2;
  static float element(u32 bits, u32 i) { return bf16_bits_to_f32(static_cast<u16>(bits >> 16 * i)); }
};

struct Tf32 {
  static constexpr u32 kK = 8, kPerRegister = 1;
  static float element(u32 bits, u32) { return bits_float(bits & 0xffffe000u); }
};

struct E4m3 {
  static constexpr u32 kK = 32, kPerRegister = 4;
  static float element(u32 bits, u32 i) { return e4m3_bits_to_f32(static_cast<u8>(bits >> 8 * i)); }
};

template <class Type>
void complete(Thread&, WarpOperation& operation) {
  constexpr u32 kPer = Type::kPerRegister, kHalf = Type::kK / 2;
  alignas(64) float a[Type::kK][kM], b[Type::kK][kN], d[kM][kN];
  for (u32 lane = 0; lane < kWarpSize; ++lane) {
    const Fragments& f = *static_cast<Fragments*>(operation.pointer[lane]);
    const u32 g = lane / 4, t = lane % 4;
    for (u32 i = 0; i < kPer; ++i) {
      const u32 k = t * kPer + i;
      a[k][g] = Type::element(f.a[0], i);
      a[k][g + 8] = Type::element(f.a[1], i);
      a[k + kHalf][g] = Type::element(f.a[2], i);
      a[k + kHalf][g + 8] = Type::element(f.a[3], i);
      b[k][g] = Type::element(f.b[0], i);
      b[k + kHalf][g] = Type::element(f.b[1], i);
    }
    for (u32 i = 0; i < 2; ++i) {
      d[g][2 * t + i] = f.c[i];
      d[g + 8][2 * t + i] = f.c[2 + i];
    }
  }
  for (u32 row = 0; row < kM; row += 8) multiply_block<8, 1>(&a[0][row], 1, kM, &b[0][0], kN, d[row], kN, Type::kK);
  for (u32 lane = 0; lane < kWarpSize; ++lane) {
    const Fragments& f = *static_cast<Fragments*>(operation.pointer[lane]);
    const u32 g = lane / 4, t = lane % 4;
    for (u32 i = 0; i < 2; ++i) {
      f.d[i] = d[g][2 * t + i];
      f.d[2 + i] = d[g + 8][2 * t + i];
    }
  }
}

template <class Type>
void product(CallSite site, int kind, const char* name, Fragments fragments) {
  warp_rendezvous(site, kind, name, kFullWarp, 0, 0, &fragments, complete<Type>);
}

}  // namespace

extern "C" void cki_sim_mma_m16n8k16_f16(float* d, const unsigned* a, const unsigned* b, const float* c) {
  product<F16>(CKI_SIM_CALL_SITE, kMmaF16, "mma.m16n8k16.f16", {d, a, b, c});
}

extern "C" void cki_sim_mma_m16n8k16_bf16(float* d, const unsigned* a, const unsigned* b, const float* c) {
  product<Bf16>(CKI_SIM_CALL_SITE, kMmaBf16, "mma.m16n8k16.bf16", {d, a, b, c});
}

extern "C" void cki_sim_mma_m16n8k8_tf32(float* d, const unsigned* a, const unsigned* b, const float* c) {
  product<Tf32>(CKI_SIM_CALL_SITE, kMmaTf32, "mma.m16n8k8.tf32", {d, a, b, c});
}

extern "C" void cki_sim_mma_m16n8k32_e4m3(float* d, const unsigned* a, const unsigned* b, const float* c) {
  product<E4m3>(CKI_SIM_CALL_SITE, kMmaE4m3, "mma.m16n8k32.e4m3", {d, a, b, c});
}
