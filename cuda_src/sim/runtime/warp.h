// Warp-wide operations: a rendezvous of the lanes named by a mask. The last lane to arrive computes for all.
#pragma once
#include "../runtime_api.h"
#include "types.h"

namespace cki::sim {

struct Thread;
struct WarpOperation;

// Computes the operation for all lanes of its mask; runs on the last lane that arrives. Leaves results through the lanes'
// pointers, or in their warp's `result`.
using CompleteWarpOperation = void (*)(Thread& last, WarpOperation& operation);

// One operation that some lanes of a warp have reached.
struct WarpOperation {
  u32 mask = 0;          // lanes that take part
  u32 arrived = 0;       // of those, who is here; 0 = this entry is free
  int kind = 0;
  const char* name = "";
  CompleteWarpOperation complete = nullptr;
  CallSite site[kWarpSize];
  u64 value[kWarpSize];
  u32 argument[kWarpSize];
  void* pointer[kWarpSize];
};

struct Warp {
  static constexpr u32 kEntries = 4;
  WarpOperation pending[kEntries];   // several masks can be open at once; more than four are reported
  u32 open = 0;               // entries of `pending` in use
  u32 lanes = 0;              // lanes that exist
  u32 exited = 0;             // lanes that have returned from the kernel: no operation waits for them
  u64 result[kWarpSize];      // of the last operation that each lane took part in
};

// Joins the operation of kind `kind` for `mask` and returns when it is complete. Masks that wait for each
// other, a caller outside its mask, and different kinds in one mask are fatal. Engines take kinds from CKI_SIM_WARP_OPERATIONS + n on (mma, ldmatrix, ...)
// and those need every lane of `mask` to exist; the others go on without lanes that have exited. When `complete` runs,
// operation.mask holds the lanes that came. `name` is for the reports. Returns the lane's `result`.
u64 warp_rendezvous(CallSite site, int kind, const char* name, u32 mask, u64 value, u32 argument, void* pointer,
                    CompleteWarpOperation complete);

// The operation that the thread waits in, or null.
const WarpOperation* open_operation(const Thread& thread);

// The thread has exited: operations that waited for its lane may now be complete.
void warp_after_exit(Thread& thread);

constexpr u32 kFullWarp = 0xffffffffu;

// Numbers of the engines' warp-wide operations, so that two different ones in one rendezvous are reported. ldmatrix and
// stmatrix add their shape (matrices and transposition, below 16) to theirs.
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
