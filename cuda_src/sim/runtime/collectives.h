// Numbers of the engines' warp-wide operations, so that two different ones in one rendezvous are reported. ldmatrix and
// stmatrix add their shape (matrices and transposition, below 16) to theirs.
#pragma once
#include "../runtime_api.h"
#include "types.h"

namespace cki::sim {

constexpr u32 kFullWarp = 0xffffffffu;

enum EngineWarpOperation {
  kLdmatrix = CKI_SIM_WARP_OPERATIONS,
  kStmatrix = kLdmatrix + 16,
  kMovmatrix = kStmatrix + 16,
  kMmaF16,
  kMmaBf16,
  kMmaTf32,
  kMmaE4m3,
  kSetmaxnreg,
};

}  // namespace cki::sim
