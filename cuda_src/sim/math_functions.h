// Math functions that CUDA has and <math.h> has not. The approximate ones compute in full precision: results on the GPU
// differ from these within the bounds that the CUDA manual states.
#pragma once

// ---- min and max for every mix of integer types, as CUDA overloads them ----

static inline int min(int a, int b) { return a < b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
static inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
static inline long min(long a, long b) { return a < b ? a : b; }
static inline unsigned long min(unsigned long a, unsigned long b) { return a < b ? a : b; }
static inline long long min(long long a, long long b) { return a < b ? a : b; }
static inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
static inline float min(float a, float b) { return fminf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
static inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
static inline long max(long a, long b) { return a > b ? a : b; }
static inline unsigned long max(unsigned long a, unsigned long b) { return a > b ? a : b; }
static inline long long max(long long a, long long b) { return a > b ? a : b; }
static inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }

// ---- functions by name ----

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
static inline float normcdff(float x) { return 0.5f * erfcf(x * -0.70710678118654752f); }
static inline float fdividef(float a, float b) { return a / b; }
static inline float sinpif(float x) { return static_cast<float>(sin(3.14159265358979323846 * x)); }
static inline float cospif(float x) { return static_cast<float>(cos(3.14159265358979323846 * x)); }
static inline void sincospif(float x, float* sine, float* cosine) {
  *sine = sinpif(x);
  *cosine = cospif(x);
}

// ---- intrinsics; macros where the C library has a function of that name ----

#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __sincosf(x, s, c) sincosf(x, s, c)
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }   // NaN becomes 0
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

// Never contracted into a fused multiply-add: the result passes through memory, unseen by the optimiser.
static inline float __fmul_rn(float a, float b) {
  float result = a * b;
  __asm__("" : "+m"(result));
  return result;
}
static inline float __fadd_rn(float a, float b) {
  __asm__("" : "+m"(a));
  return a + b;
}
static inline float __fsub_rn(float a, float b) {
  __asm__("" : "+m"(a));
  return a - b;
}

// ---- conversions: NaN becomes 0 and out-of-range values saturate, as on the device ----

namespace cki_sim_detail {
template <class To>
inline To saturating(double x, double low, double high) {
  if (!(x == x)) return 0;
  if (x <= low) return static_cast<To>(low);
  if (x >= high) return static_cast<To>(high);
  return static_cast<To>(x);
}
inline int to_int(double x) { return saturating<int>(x, -2147483648.0, 2147483647.0); }
inline unsigned to_uint(double x) { return saturating<unsigned>(x, 0.0, 4294967295.0); }
}  // namespace cki_sim_detail

static inline int __float2int_rn(float x) { return cki_sim_detail::to_int(nearbyint(static_cast<double>(x))); }
static inline int __float2int_rz(float x) { return cki_sim_detail::to_int(trunc(static_cast<double>(x))); }
static inline int __float2int_rd(float x) { return cki_sim_detail::to_int(floor(static_cast<double>(x))); }
static inline int __float2int_ru(float x) { return cki_sim_detail::to_int(ceil(static_cast<double>(x))); }
static inline unsigned __float2uint_rn(float x) { return cki_sim_detail::to_uint(nearbyint(static_cast<double>(x))); }
static inline unsigned __float2uint_rz(float x) { return cki_sim_detail::to_uint(trunc(static_cast<double>(x))); }
static inline float __int2float_rn(int x) { return static_cast<float>(x); }
static inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
static inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
