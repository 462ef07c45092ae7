// Asynchronous work that the hardware may complete at any later time. In adversarial mode it completes as late as the rules
// allow: when nothing else in the group can run, at random (rarely), or when its engine says that somebody has waited for
// it. In plain mode engines complete work at issue and do not come here.
#pragma once
#include <functional>
#include <utility>
#include <vector>

#include "types.h"

namespace cki::sim {

class PendingOperations {
 public:
  using Handle = u64;

  // `complete` runs once, later, on any OS thread of the group and with no current thread: it must not wait, and must hold
  // what it needs (blocks, host pointers) by itself. It may wake threads, move data and report.
  Handle add(std::function<void()> complete);

  // Completes that one now, unless it already has; for waits that must find it done (bulk and cp.async groups).
  void complete(Handle handle);
  bool is_pending(Handle handle) const;

  bool empty() const { return operations_.empty(); }
  void complete_any(u64 random);
  void clear() { operations_.clear(); }

 private:
  void run(std::size_t position);
  std::vector<std::pair<Handle, std::function<void()>>> operations_;
  Handle last_ = 0;
};

}  // namespace cki::sim
