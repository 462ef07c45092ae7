// The list of asynchronous operations that have not completed yet.
#include "pending.h"

#include "scheduler.h"

namespace cki::sim {

PendingOperations::Handle PendingOperations::add(std::function<void()> complete) {
  operations_.emplace_back(++last_, std::move(complete));
  return last_;
}

bool PendingOperations::is_pending(Handle handle) const {
  for (const auto& operation : operations_)
    if (operation.first == handle) return true;
  return false;
}

void PendingOperations::complete(Handle handle) {
  for (std::size_t i = 0; i < operations_.size(); ++i)
    if (operations_[i].first == handle) return run(i);
}

void PendingOperations::complete_any(u64 random) { run(random % operations_.size()); }

void PendingOperations::run(std::size_t position) {
  std::function<void()> complete = std::move(operations_[position].second);
  operations_.erase(operations_.begin() + static_cast<std::ptrdiff_t>(position));
  // With no current thread: its effects belong to nobody's program order.
  cki_sim_thread_view* thread = cki_sim_thread;
  cki_sim_thread = nullptr;
  complete();
  cki_sim_thread = thread;
}

}  // namespace cki::sim
