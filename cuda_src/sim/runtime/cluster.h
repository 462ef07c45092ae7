// What the scheduler needs to know of cluster barriers.
#pragma once

namespace cki::sim {

struct Block;

// A thread of the block has exited: a cluster barrier that waits for all others may now be complete.
void cluster_after_exit(Block& block);

}  // namespace cki::sim
