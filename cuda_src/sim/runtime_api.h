// What a kernel's translation unit and the runtime library both see: the views that threadIdx and blockIdx read, and the
// core's C entry points. The engines of the asynchronous instructions declare their own entry points beside ptx/*.cuh.
#pragma once
#include <cstddef>
#include <cstdint>

struct cki_sim_index {
  unsigned x, y, z;
};

// First member of the runtime's Thread: what a kernel may read of the running CUDA thread.
struct cki_sim_thread_view {
  cki_sim_index thread_index;
  unsigned linear_index;   // x fastest; lane = linear_index % 32
  unsigned* progress;      // counts writes that a polling loop elsewhere may be waiting for
};

// One copy for each OS thread; an OS thread runs one block at a time, so these are constant while a block runs.
struct cki_sim_block_view {
  cki_sim_index block_index, block_dim, grid_dim;
  cki_sim_index cluster_index, cluster_dim, index_in_cluster;
  unsigned rank_in_cluster;   // x fastest
};

// __thread, not thread_local: no initialisation check at each access. initial-exec: one load for each access; it is taken out
// of the small static TLS reserve, so nothing big may join them.
#define CKI_SIM_TLS __thread __attribute__((tls_model("initial-exec")))
extern CKI_SIM_TLS cki_sim_thread_view* cki_sim_thread;
extern CKI_SIM_TLS cki_sim_block_view cki_sim_block;

// Warp-wide operations by number; the order is known to runtime/warp.cpp alone besides the callers of cki_sim_warp.
enum cki_sim_warp_operation {
  CKI_SIM_SYNCWARP,
  CKI_SIM_SHFL_IDX,
  CKI_SIM_SHFL_UP,
  CKI_SIM_SHFL_DOWN,
  CKI_SIM_SHFL_XOR,
  CKI_SIM_BALLOT,
  CKI_SIM_ALL,
  CKI_SIM_ANY,
  CKI_SIM_MATCH_ANY,
  CKI_SIM_MATCH_ALL,
  CKI_SIM_ELECT,
  CKI_SIM_REDUCE_ADD,
  CKI_SIM_REDUCE_MIN_SIGNED,
  CKI_SIM_REDUCE_MAX_SIGNED,
  CKI_SIM_REDUCE_MIN_UNSIGNED,
  CKI_SIM_REDUCE_MAX_UNSIGNED,
  CKI_SIM_REDUCE_AND,
  CKI_SIM_REDUCE_OR,
  CKI_SIM_REDUCE_XOR,
  CKI_SIM_WARP_OPERATIONS   // engines number their own collectives from here on
};

enum cki_sim_barrier_reduction { CKI_SIM_BARRIER_PLAIN, CKI_SIM_BARRIER_OR, CKI_SIM_BARRIER_AND, CKI_SIM_BARRIER_COUNT };

extern "C" {
// Barriers. threads < 0 stands for every thread of the block that has not exited.
void cki_sim_bar_sync(int id, int threads);
void cki_sim_bar_arrive(int id, int threads);
int cki_sim_syncthreads_reduce(int reduction, int predicate);
// Warp-wide operations: value and argument of this lane in, result of this lane out.
std::uint64_t cki_sim_warp(int operation, unsigned mask, std::uint64_t value, unsigned argument);
// 32-bit shared addresses. shared_address takes a pointer into this block's window or, in a cluster, a peer's.
unsigned cki_sim_shared_address(const void* pointer);
void* cki_sim_shared_pointer(unsigned address);
unsigned cki_sim_mapa(unsigned address, unsigned rank);               // shared::cta or shared::cluster -> the peer's address
void* cki_sim_mapa_pointer(const void* pointer, unsigned rank);       // generic pointers, as cluster.map_shared_rank
void cki_sim_cluster_arrive(int release);
void cki_sim_cluster_wait(int acquire);
// Control.
void cki_sim_yield_poll();      // a polling loop calls this once for each look at memory
void cki_sim_yield_after_look();   // an atomic found nothing to change: the same, but it alone is no sign of a deadlock
[[noreturn]] void cki_sim_trap();
[[noreturn]] void cki_sim_assertion_failed(const char* condition);
unsigned long long cki_sim_clock();
}
