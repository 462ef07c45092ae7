// Runs a grid: teams of OS threads take one group of blocks after another until none is left.
#include "launch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "engine.h"
#include "race.h"
#include "scheduler.h"

namespace cki::sim {

namespace {

// Blocks with their stacks, and race detectors with their cells, are reused by later launches.
std::mutex free_mutex;
std::vector<Block*> free_blocks;
std::vector<std::unique_ptr<RaceDetector>> free_detectors;
u64 last_serial = 0;

Block* take_block() {
  const std::lock_guard<std::mutex> lock(free_mutex);
  if (free_blocks.empty()) return new Block;
  Block* block = free_blocks.back();
  free_blocks.pop_back();
  return block;
}

std::unique_ptr<RaceDetector> take_detector() {
  const std::lock_guard<std::mutex> lock(free_mutex);
  if (free_detectors.empty()) return std::make_unique<RaceDetector>();
  std::unique_ptr<RaceDetector> detector = std::move(free_detectors.back());
  free_detectors.pop_back();
  return detector;
}

void give_back(Group& group) {
  const std::lock_guard<std::mutex> lock(free_mutex);
  free_blocks.insert(free_blocks.end(), group.blocks.rbegin(), group.blocks.rend());
  if (group.races) free_detectors.push_back(std::move(group.races));
}

cki_sim_index index3(const unsigned (&v)[3]) { return {v[0], v[1], v[2]}; }

cki_sim_index unravel(u64 linear, const unsigned (&size)[3]) {
  return {static_cast<u32>(linear % size[0]), static_cast<u32>(linear / size[0] % size[1]),
          static_cast<u32>(linear / size[0] / size[1])};
}

// Groups hold whole clusters in order of the cluster's index; an ordinary block is a cluster of one.
cki_sim_block_view view_of(const cki_sim_config& config, u32 cluster_size, u64 block_number) {
  cki_sim_block_view view{};
  view.block_dim = index3(config.block);
  view.grid_dim = index3(config.grid);
  view.cluster_dim = index3(config.cluster);
  const unsigned clusters[3] = {config.grid[0] / config.cluster[0], config.grid[1] / config.cluster[1],
                                config.grid[2] / config.cluster[2]};
  view.rank_in_cluster = static_cast<u32>(block_number % cluster_size);
  view.cluster_index = unravel(block_number / cluster_size, clusters);
  view.index_in_cluster = unravel(view.rank_in_cluster, config.cluster);
  view.block_index = {view.cluster_index.x * config.cluster[0] + view.index_in_cluster.x,
                      view.cluster_index.y * config.cluster[1] + view.index_in_cluster.y,
                      view.cluster_index.z * config.cluster[2] + view.index_in_cluster.z};
  return view;
}

// On the block's own OS thread: its shared memory is there.
void place_window(Block& block, const Launch& launch) {
  SharedWindow& window = block.window;
  window.size = launch.module.window_size;
  window.dynamic_offset = launch.module.dynamic_offset;
  window.dynamic_size = launch.config.dynamic_bytes;
  window.arrays = launch.module.arrays;
  window.array_count = launch.module.array_count;
  window.base = static_cast<u8*>(launch.module.dynamic_address()) - window.dynamic_offset;
  // The adversary's shared memory starts as NaN, not as zeros or an earlier block's leftovers.
  if (block.group->checks.adversarial) std::memset(window.base, 0xff, window.dynamic_offset + window.dynamic_size);
}

void reset_threads(Block& block, const cki_sim_config& config) {
  const u32 count = config.block[0] * config.block[1] * config.block[2];
  block.threads.resize(count);
  for (u32 i = 0; i < count; ++i) {
    Thread& thread = block.threads[i];
    thread.view = {unravel(i, config.block), i, &block.group->progress};
    thread.block = &block;
  }
  const u32 warps = (count + kWarpSize - 1) / kWarpSize;
  block.warps.resize(warps);
  for (u32 w = 0; w < warps; ++w) {
    for (WarpOperation& operation : block.warps[w].pending) operation.arrived = 0;
    block.warps[w].open = block.warps[w].exited = 0;
    const u32 lanes = std::min(kWarpSize, count - w * kWarpSize);
    block.warps[w].lanes = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
  }
}

void reset_block(Block& block, Group& group, u32 rank) {
  const Launch& launch = *group.launch;
  block.group = &group;
  block.rank = rank;
  block.serial = __atomic_add_fetch(&last_serial, 1, __ATOMIC_RELAXED);
  block.view = view_of(launch.config, launch.cluster_size, group.index * launch.blocks_per_group + rank);
  reset_threads(block, launch.config);
  for (NamedBarrier& barrier : block.barriers) barrier.block_start();
  std::memset(block.ready, 0, sizeof block.ready);
  block.ready_warps = block.last_warp = 0;
  block.polling.clear();
  block.live = block.thread_count();
  block.in_flight.block_start(launch.module.window_size);
  if (!group.checks.adversarial) return;
  block.priority = group.random.below(1u << 31);
  for (u32& priority : block.warp_priority) priority = group.random.below(1u << 31);
}

void reset_group(Group& group, u64 index) {
  const Launch& launch = *group.launch;
  group.index = index;
  group.random.seed(launch.config.seed, index);
  group.policy = Group::Policy::RunToBlock;
  if (group.checks.adversarial) {
    // Mostly late: work that completes soon after its issue hides a missing wait.
    constexpr u32 kEarlyCompletion[] = {0, 0, 4096, 64};
    group.policy = static_cast<Group::Policy>(1 + group.random.below(3));
    group.early_completion = kEarlyCompletion[group.random.below(4)];
  }
  group.plain = !group.checks.adversarial && group.blocks.size() == 1;
  group.pending.clear();
  group.finished = group.aborted = false;
  group.polling = group.poll_rounds = group.idle_rounds = 0;
  group.watch_rounds.clear();
  for (u32 rank = 0; rank < group.blocks.size(); ++rank) reset_block(*group.blocks[rank], group, rank);
  group.live = group.blocks[0]->live * static_cast<u32>(group.blocks.size());
}

void run_group(Group& group) {
  const Launch& launch = *group.launch;
  auto start_checks = [&group] {
    if (group.races) group.races->group_start(group);
  };
  if (group.blocks.size() == 1) {
    place_window(*group.blocks[0], launch);
    prepare_block(*group.blocks[0]);
    start_checks();
    run_block(*group.blocks[0], true);
    return;
  }
  // Every OS thread must have placed its window and made its threads ready before the first block runs.
  std::atomic<u32> placed{0};
  sem_t all_placed;
  sem_init(&all_placed, 0, 0);
  const u32 count = static_cast<u32>(group.blocks.size());
  run_on_threads(count, [&](unsigned rank) {
    place_window(*group.blocks[rank], launch);
    prepare_block(*group.blocks[rank]);
    if (++placed == count) sem_post(&all_placed);
    if (rank == 0) {
      while (sem_wait(&all_placed) != 0) {
      }
      start_checks();
    }
    run_block(*group.blocks[rank], rank == 0);
  });
  sem_destroy(&all_placed);
}

void run_team(Launch& launch, u32 slot) {
  Group group;
  group.launch = &launch;
  group.checks = launch.checks;
  group.cluster_size = launch.cluster_size;
  group.slot = slot;
  for (u32 i = 0; i < launch.blocks_per_group; ++i) group.blocks.push_back(take_block());
  if (group.checks.races) group.races = take_detector();
  for (u64 index; (index = launch.next_group++) < launch.groups;) {
    reset_group(group, index);
    run_group(group);
    ++launch.progress;
    if (group.aborted) launch.aborted = true;
    if (launch.aborted) break;
  }
  launch.poll_slots[slot].running = false;
  give_back(group);
  if (!group.report.findings()) return;
  const std::lock_guard<std::mutex> lock(launch.report_mutex);
  launch.report += group.report.text();
  launch.findings += group.report.findings();
}

}  // namespace

}  // namespace cki::sim

using namespace cki::sim;

extern "C" int cki_sim_launch(const cki_sim_module* module, const cki_sim_config* config, void** arguments,
                              char** report) {
  Launch launch(*module, *config, arguments);
  const u64 blocks = u64{config->grid[0]} * config->grid[1] * config->grid[2];
  launch.cluster_size = config->cluster[0] * config->cluster[1] * config->cluster[2];
  launch.blocks_per_group = config->cooperative ? static_cast<u32>(blocks) : launch.cluster_size;
  launch.groups = blocks / launch.blocks_per_group;
  launch.teams = static_cast<u32>(std::max<u64>(1, std::min<u64>(config->os_threads, launch.groups)));
  launch.poll_slots.reset(new PollSlot[launch.teams]);
  for (u32 i = 0; i < launch.teams; ++i) launch.poll_slots[i].running = true;
  if (launch.checks.bounds)
    launch.bounds.set(config->extents, config->extent_count, reinterpret_cast<const void*>(module->entry));
  run_on_threads(launch.teams, [&launch](unsigned slot) { run_team(launch, slot); });
  *report = strdup(launch.report.c_str());
  return launch.findings;
}

extern "C" void cki_sim_free(char* report) { std::free(report); }
