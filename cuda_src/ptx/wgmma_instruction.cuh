// The instructions behind ptx/wgmma.cuh: wgmma.mma_async for every N, one specialisation an N.
//
// An asm statement takes only literal text, lists its N / 2 accumulators one by one, and numbers its other operands
// after them: no template can write it, and each N needs a text of its own. Spelled out, the 192 statements are 400 KB,
// which every Hopper kernel would read; macros, used in this file alone, say once what they share.
#pragma once

#include "common/types.cuh"

namespace cki::ptx {

// Functions <element>_shared and <element>_registers, by where A is. a, b: a descriptor, or the fragment of A.
// scale_d = 0 overwrites d. A transposed operand is MN-major; e4m3 and tf32 have none.
template <int N>
struct WgmmaInstruction;

// The accumulators of each N in the text of a statement: those of N - 8, and four more.
#define CKI_TEXT_8 "%0, %1, %2, %3"
#define CKI_TEXT_16 CKI_TEXT_8 ", %4, %5, %6, %7"
#define CKI_TEXT_24 CKI_TEXT_16 ", %8, %9, %10, %11"
#define CKI_TEXT_32 CKI_TEXT_24 ", %12, %13, %14, %15"
#define CKI_TEXT_40 CKI_TEXT_32 ", %16, %17, %18, %19"
#define CKI_TEXT_48 CKI_TEXT_40 ", %20, %21, %22, %23"
#define CKI_TEXT_56 CKI_TEXT_48 ", %24, %25, %26, %27"
#define CKI_TEXT_64 CKI_TEXT_56 ", %28, %29, %30, %31"
#define CKI_TEXT_72 CKI_TEXT_64 ", %32, %33, %34, %35"
#define CKI_TEXT_80 CKI_TEXT_72 ", %36, %37, %38, %39"
#define CKI_TEXT_88 CKI_TEXT_80 ", %40, %41, %42, %43"
#define CKI_TEXT_96 CKI_TEXT_88 ", %44, %45, %46, %47"
#define CKI_TEXT_104 CKI_TEXT_96 ", %48, %49, %50, %51"
#define CKI_TEXT_112 CKI_TEXT_104 ", %52, %53, %54, %55"
#define CKI_TEXT_120 CKI_TEXT_112 ", %56, %57, %58, %59"
#define CKI_TEXT_128 CKI_TEXT_120 ", %60, %61, %62, %63"
#define CKI_TEXT_136 CKI_TEXT_128 ", %64, %65, %66, %67"
#define CKI_TEXT_144 CKI_TEXT_136 ", %68, %69, %70, %71"
#define CKI_TEXT_152 CKI_TEXT_144 ", %72, %73, %74, %75"
#define CKI_TEXT_160 CKI_TEXT_152 ", %76, %77, %78, %79"
#define CKI_TEXT_168 CKI_TEXT_160 ", %80, %81, %82, %83"
#define CKI_TEXT_176 CKI_TEXT_168 ", %84, %85, %86, %87"
#define CKI_TEXT_184 CKI_TEXT_176 ", %88, %89, %90, %91"
#define CKI_TEXT_192 CKI_TEXT_184 ", %92, %93, %94, %95"
#define CKI_TEXT_200 CKI_TEXT_192 ", %96, %97, %98, %99"
#define CKI_TEXT_208 CKI_TEXT_200 ", %100, %101, %102, %103"
#define CKI_TEXT_216 CKI_TEXT_208 ", %104, %105, %106, %107"
#define CKI_TEXT_224 CKI_TEXT_216 ", %108, %109, %110, %111"
#define CKI_TEXT_232 CKI_TEXT_224 ", %112, %113, %114, %115"
#define CKI_TEXT_240 CKI_TEXT_232 ", %116, %117, %118, %119"
#define CKI_TEXT_248 CKI_TEXT_240 ", %120, %121, %122, %123"
#define CKI_TEXT_256 CKI_TEXT_248 ", %124, %125, %126, %127"

// The same as operands.
#define CKI_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CKI_D_8 CKI_FOUR(0)
#define CKI_D_16 CKI_D_8, CKI_FOUR(4)
#define CKI_D_24 CKI_D_16, CKI_FOUR(8)
#define CKI_D_32 CKI_D_24, CKI_FOUR(12)
#define CKI_D_40 CKI_D_32, CKI_FOUR(16)
#define CKI_D_48 CKI_D_40, CKI_FOUR(20)
#define CKI_D_56 CKI_D_48, CKI_FOUR(24)
#define CKI_D_64 CKI_D_56, CKI_FOUR(28)
#define CKI_D_72 CKI_D_64, CKI_FOUR(32)
#define CKI_D_80 CKI_D_72, CKI_FOUR(36)
#define CKI_D_88 CKI_D_80, CKI_FOUR(40)
#define CKI_D_96 CKI_D_88, CKI_FOUR(44)
#define CKI_D_104 CKI_D_96, CKI_FOUR(48)
#define CKI_D_112 CKI_D_104, CKI_FOUR(52)
#define CKI_D_120 CKI_D_112, CKI_FOUR(56)
#define CKI_D_128 CKI_D_120, CKI_FOUR(60)
#define CKI_D_136 CKI_D_128, CKI_FOUR(64)
#define CKI_D_144 CKI_D_136, CKI_FOUR(68)
#define CKI_D_152 CKI_D_144, CKI_FOUR(72)
#define CKI_D_160 CKI_D_152, CKI_FOUR(76)
#define CKI_D_168 CKI_D_160, CKI_FOUR(80)
#define CKI_D_176 CKI_D_168, CKI_FOUR(84)
#define CKI_D_184 CKI_D_176, CKI_FOUR(88)
#define CKI_D_192 CKI_D_184, CKI_FOUR(92)
#define CKI_D_200 CKI_D_192, CKI_FOUR(96)
#define CKI_D_208 CKI_D_200, CKI_FOUR(100)
#define CKI_D_216 CKI_D_208, CKI_FOUR(104)
#define CKI_D_224 CKI_D_216, CKI_FOUR(108)
#define CKI_D_232 CKI_D_224, CKI_FOUR(112)
#define CKI_D_240 CKI_D_232, CKI_FOUR(116)
#define CKI_D_248 CKI_D_240, CKI_FOUR(120)
#define CKI_D_256 CKI_D_248, CKI_FOUR(124)

// One statement. A, B, ScaleD, Transposes: those operands' places in the text; then the operands.
#define CKI_STATEMENT(N, K, Type, A, B, ScaleD, Transposes, ...)                                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ScaleD ", 0;\n"                                                    \
               "wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." #Type "." #Type                                  \
               " {" CKI_TEXT_##N "}, " A ", " B ", p, 1, 1" Transposes ";\n}"                                         \
               : CKI_D_##N                                                                                            \
               : __VA_ARGS__)
#define CKI_FRAGMENT "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// The products of 16-bit elements, then those without transposed operands. P0 to P6: the places that follow the accumulators.
#define CKI_PRODUCTS_16(N, Type, P0, P1, P2, P3, P4, P5, P6)                                                          \
  template <int TransposeA, int TransposeB>                                                                           \
  static __device__ __forceinline__ void Type##_shared(float (&d)[N / 2], u64 a, u64 b, int scale_d) {                \
    CKI_STATEMENT(N, 16, Type, P0, P1, P2, ", " P3 ", " P4, "l"(a), "l"(b), "r"(scale_d), "n"(TransposeA),            \
                  "n"(TransposeB));                                                                                   \
  }                                                                                                                   \
  template <int TransposeB>                                                                                           \
  static __device__ __forceinline__ void Type##_registers(float (&d)[N / 2], const u32 (&a)[4], u64 b, int scale_d) { \
    CKI_STATEMENT(N, 16, Type, "{" P0 ", " P1 ", " P2 ", " P3 "}", P4, P5, ", " P6, CKI_FRAGMENT, "l"(b),             \
                  "r"(scale_d), "n"(TransposeB));                                                                     \
  }

#define CKI_PRODUCTS_K_MAJOR(N, K, Type, P0, P1, P2, P3, P4, P5)                                                      \
  static __device__ __forceinline__ void Type##_shared(float (&d)[N / 2], u64 a, u64 b, int scale_d) {                \
    CKI_STATEMENT(N, K, Type, P0, P1, P2, "", "l"(a), "l"(b), "r"(scale_d));                                          \
  }                                                                                                                   \
  static __device__ __forceinline__ void Type##_registers(float (&d)[N / 2], const u32 (&a)[4], u64 b, int scale_d) { \
    CKI_STATEMENT(N, K, Type, "{" P0 ", " P1 ", " P2 ", " P3 "}", P4, P5, "", CKI_FRAGMENT, "l"(b), "r"(scale_d));    \
  }

#define CKI_WGMMA(N, P0, P1, P2, P3, P4, P5, P6)                                                                      \
  template <>                                                                                                         \
  struct WgmmaInstruction<N> {                                                                                        \
    CKI_PRODUCTS_16(N, f16, P0, P1, P2, P3, P4, P5, P6)                                                               \
    CKI_PRODUCTS_16(N, bf16, P0, P1, P2, P3, P4, P5, P6)                                                              \
    CKI_PRODUCTS_K_MAJOR(N, 32, e4m3, P0, P1, P2, P3, P4, P5)                                                         \
    CKI_PRODUCTS_K_MAJOR(N, 8, tf32, P0, P1, P2, P3, P4, P5)                                                          \
  };

CKI_WGMMA(8, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
CKI_WGMMA(16, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
CKI_WGMMA(24, "%12", "%13", "%14", "%15", "%16", "%17", "%18")
CKI_WGMMA(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
CKI_WGMMA(40, "%20", "%21", "%22", "%23", "%24", "%25", "%26")
CKI_WGMMA(48, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
CKI_WGMMA(56, "%28", "%29", "%30", "%31", "%32", "%33", "%34")
CKI_WGMMA(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
CKI_WGMMA(72, "%36", "%37", "%38", "%39", "%40", "%41", "%42")
CKI_WGMMA(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
CKI_WGMMA(88, "%44", "%45", "%46", "%47", "%48", "%49", "%50")
CKI_WGMMA(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
CKI_WGMMA(104, "%52", "%53", "%54", "%55", "%56", "%57", "%58")
CKI_WGMMA(112, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
CKI_WGMMA(120, "%60", "%61", "%62", "%63", "%64", "%65", "%66")
CKI_WGMMA(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
CKI_WGMMA(136, "%68", "%69", "%70", "%71", "%72", "%73", "%74")
CKI_WGMMA(144, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
CKI_WGMMA(152, "%76", "%77", "%78", "%79", "%80", "%81", "%82")
CKI_WGMMA(160, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
CKI_WGMMA(168, "%84", "%85", "%86", "%87", "%88", "%89", "%90")
CKI_WGMMA(176, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
CKI_WGMMA(184, "%92", "%93", "%94", "%95", "%96", "%97", "%98")
CKI_WGMMA(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
CKI_WGMMA(200, "%100", "%101", "%102", "%103", "%104", "%105", "%106")
CKI_WGMMA(208, "%104", "%105", "%106", "%107", "%108", "%109", "%110")
CKI_WGMMA(216, "%108", "%109", "%110", "%111", "%112", "%113", "%114")
CKI_WGMMA(224, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
CKI_WGMMA(232, "%116", "%117", "%118", "%119", "%120", "%121", "%122")
CKI_WGMMA(240, "%120", "%121", "%122", "%123", "%124", "%125", "%126")
CKI_WGMMA(248, "%124", "%125", "%126", "%127", "%128", "%129", "%130")
CKI_WGMMA(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

}  // namespace cki::ptx
