// CUDA's vector types with CUDA's alignment, and their make_ functions.
#pragma once

using uint3 = cki_sim_index;

struct char2 { alignas(2) signed char x; signed char y; };
struct uchar2 { alignas(2) unsigned char x; unsigned char y; };
struct char4 { alignas(4) signed char x; signed char y, z, w; };
struct uchar4 { alignas(4) unsigned char x; unsigned char y, z, w; };
struct short2 { alignas(4) short x; short y; };
struct ushort2 { alignas(4) unsigned short x; unsigned short y; };
struct short4 { alignas(8) short x; short y, z, w; };
struct ushort4 { alignas(8) unsigned short x; unsigned short y, z, w; };
struct int2 { alignas(8) int x; int y; };
struct int3 { int x, y, z; };
struct int4 { alignas(16) int x; int y, z, w; };
struct uint2 { alignas(8) unsigned x; unsigned y; };
struct uint4 { alignas(16) unsigned x; unsigned y, z, w; };
struct longlong2 { alignas(16) long long x; long long y; };
struct ulonglong2 { alignas(16) unsigned long long x; unsigned long long y; };
struct float2 { alignas(8) float x; float y; };
struct float3 { float x, y, z; };
struct float4 { alignas(16) float x; float y, z, w; };
struct double2 { alignas(16) double x; double y; };

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

static inline char2 make_char2(signed char x, signed char y) { return {x, y}; }
static inline uchar2 make_uchar2(unsigned char x, unsigned char y) { return {x, y}; }
static inline char4 make_char4(signed char x, signed char y, signed char z, signed char w) { return {x, y, z, w}; }
static inline uchar4 make_uchar4(unsigned char x, unsigned char y, unsigned char z, unsigned char w) {
  return {x, y, z, w};
}
static inline short2 make_short2(short x, short y) { return {x, y}; }
static inline ushort2 make_ushort2(unsigned short x, unsigned short y) { return {x, y}; }
static inline short4 make_short4(short x, short y, short z, short w) { return {x, y, z, w}; }
static inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
  return {x, y, z, w};
}
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline longlong2 make_longlong2(long long x, long long y) { return {x, y}; }
static inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline double2 make_double2(double x, double y) { return {x, y}; }
