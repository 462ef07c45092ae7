// Integer intrinsics, and bit casts between floats and integers.
#pragma once

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
