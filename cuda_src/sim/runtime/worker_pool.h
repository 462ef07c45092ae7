// OS threads that stay alive between launches: a thread's shared-memory window and the pages of its stacks are kept warm, and
// a launch does not pay for creating threads.
#pragma once
#include <functional>

namespace cki::sim {

// Runs work(1) ... work(count - 1) on pool threads and work(0) on the caller; returns when all are done. May be called from
// within such work. A child made by fork() starts with an empty pool.
void run_on_threads(unsigned count, const std::function<void(unsigned)>& work);

}  // namespace cki::sim
