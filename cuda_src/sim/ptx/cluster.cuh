// Simulated ptx/cluster.cuh: addresses of peers and the cluster barrier are the runtime's.
#pragma once

#include "common/types.cuh"
#include "ptx/address.cuh"
#include "runtime_api.h"

extern "C" void cki_sim_store_async(unsigned address, const void* value, unsigned barrier);

namespace cki::ptx {

__device__ __forceinline__ u32 cluster_cta_rank() { return cki_sim_block.rank_in_cluster; }

__device__ __forceinline__ u32 cluster_cta_count() {
  return cki_sim_block.cluster_dim.x * cki_sim_block.cluster_dim.y * cki_sim_block.cluster_dim.z;
}

__device__ __forceinline__ void cluster_arrive() { cki_sim_cluster_arrive(1); }
__device__ __forceinline__ void cluster_arrive_relaxed() { cki_sim_cluster_arrive(0); }
__device__ __forceinline__ void cluster_wait() { cki_sim_cluster_wait(1); }

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

__device__ __forceinline__ u32 map_shared_rank(const void* local, u32 cta_rank) {
  return cki_sim_mapa(shared_address(local), cta_rank);
}

__device__ __forceinline__ u32 load_shared_cluster_u32(u32 address) {
  return *static_cast<const u32*>(cki_sim_shared_pointer(address));
}

__device__ __forceinline__ float load_shared_cluster_f32(u32 address) {
  return *static_cast<const float*>(cki_sim_shared_pointer(address));
}

__device__ __forceinline__ float4 load_shared_cluster_f32x4(u32 address) {
  return *static_cast<const float4*>(cki_sim_shared_pointer(address));
}

__device__ __forceinline__ void store_shared_cluster_u32(u32 address, u32 value) {
  *static_cast<u32*>(cki_sim_shared_pointer(address)) = value;
}

__device__ __forceinline__ void store_shared_cluster_f32(u32 address, float value) {
  *static_cast<float*>(cki_sim_shared_pointer(address)) = value;
}

__device__ __forceinline__ void store_shared_cluster_f32x4(u32 address, float4 v) {
  *static_cast<float4*>(cki_sim_shared_pointer(address)) = v;
}

__device__ __forceinline__ void store_async_cluster_f32x4(u32 address, float4 v, u32 barrier) {
  cki_sim_store_async(address, &v, barrier);
}

}  // namespace cki::ptx
