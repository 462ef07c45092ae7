// Integer names, sizes and limits that every file of the runtime shares.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cki::sim {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr u32 kWarpSize = 32;
constexpr u32 kMaxThreadsPerBlock = 1024;
constexpr u32 kMaxWarps = kMaxThreadsPerBlock / kWarpSize;
constexpr u32 kMaxClusterSize = 16;              // the non-portable maximum of sm_90
constexpr u32 kMaxSharedBytes = 232448;          // 227 KB, static and dynamic together, as on sm_90
constexpr u32 kNamedBarriers = 16;
constexpr u32 kMaxCoresidentThreads = 24576;     // each fiber stack takes two kernel mappings of the 65530 that Linux gives

// Where in the kernel something happened: the return address of the runtime function that the kernel called. The Python
// side turns it into file and line with the debug information of the kernel's shared object.
using CallSite = const void*;

}  // namespace cki::sim

// To be written in the extern "C" function that the kernel calls, and passed down from there.
#define CKI_SIM_CALL_SITE (__builtin_return_address(0))
