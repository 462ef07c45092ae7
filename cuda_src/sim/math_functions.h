// Integer intrinsics, bit casts, and math functions that CUDA has and <math.h> has not. The approximate ones compute in full
// precision: results on the GPU differ from these within the bounds that the CUDA manual states.
#pragma once

// ---- integers, and bit casts between floats and integers ----

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }

static inline unsigned __brev(unsigned x) {
  x = (x & 0x55555555u) << 1 | (x >> 1 & 0x55555555u);
  x = (x & 0x33333333u) << 2 | (x >> 2 & 0x33333333u);
  x = (x & 0x0f0f0f0fu) << 4 | (x >> 4 & 0x0f0f0f0fu);
  return __builtin_bswap32(x);
}
static inline unsigned long long __brevll(unsigned long long x) {
  return static_cast<unsigned long long>(__brev(static_cast<unsigned>(x))) << 32 |
         __brev(static_cast<unsigned>(x >> 32));
}

static inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
static inline long long __mul64hi(long long a, long long b) {
  return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}

// The upper or lower half of hi:lo shifted by shift modulo 32.
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) {
  shift &= 31;
  return shift ? hi << shift | lo >> (32 - shift) : hi;
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
  shift &= 31;
  return shift ? hi << (32 - shift) | lo >> shift : lo;
}

// prmt: byte i of the result is the byte of b:a that nibble i of the selector names; bit 3 replicates its sign.
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> 4 * i & 15;
    unsigned byte = static_cast<unsigned>(bytes >> 8 * (nibble & 7) & 0xff);
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << 8 * i;
  }
  return result;
}

static inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
  return c;
}

namespace cki_sim_detail {
template <class To, class From>
inline To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit casts keep the size");
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}
}  // namespace cki_sim_detail

static inline unsigned __float_as_uint(float x) { return cki_sim_detail::bit_cast<unsigned>(x); }
static inline int __float_as_int(float x) { return cki_sim_detail::bit_cast<int>(x); }
static inline float __uint_as_float(unsigned x) { return cki_sim_detail::bit_cast<float>(x); }
static inline float __int_as_float(int x) { return cki_sim_detail::bit_cast<float>(x); }
static inline long long __double_as_longlong(double x) { return cki_sim_detail::bit_cast<long long>(x); }
static inline double __longlong_as_double(long long x) { return cki_sim_detail::bit_cast<double>(x); }

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
