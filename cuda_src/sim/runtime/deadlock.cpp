// Neighbouring threads that wait for the same thing at the same place are folded into one line.
#include "deadlock.h"

#include "scheduler.h"

namespace cki::sim {

namespace {

bool same_wait(const Thread& a, const Thread& b) {
  if (a.state != b.state) return false;
  if (a.state == ThreadState::Exited) return true;
  const WarpOperation *in_a = open_operation(a), *in_b = open_operation(b);
  if (in_a || in_b) return in_a == in_b && in_a->site[a.lane()] == in_b->site[b.lane()];
  return a.wait.site == b.wait.site && a.wait.what == b.wait.what && a.wait.a == b.wait.a && a.wait.b == b.wait.b;
}

void describe(const Thread& thread, Text& text) {
  if (const WarpOperation* operation = open_operation(thread)) {
    text.add("wait at %s of mask 0x%08x (lanes 0x%08x missing)", operation->name, operation->mask,
             operation->mask & ~operation->arrived);
    text.add_site(operation->site[thread.lane()]);
    return;
  }
  switch (thread.state) {
    case ThreadState::Ready:
      text.add("can run");
      return;
    case ThreadState::Exited:
      text.add("exited");
      return;
    case ThreadState::Polling:
      text.add("poll memory that nobody changes");
      break;
    case ThreadState::Waiting:
      text.add("wait at %s", thread.wait.what);
      if (thread.wait.describe) thread.wait.describe(thread, text);
      break;
  }
  text.add_site(thread.wait.site);
}

}  // namespace

void report_deadlock(Group& group) {
  Text& text = group.report.text_to_append();
  text.add("DEADLOCK%s: no thread can go on\n", group.polling ? " (polling)" : "");
  if (group.polling)
    text.add("  blocks of an ordinary grid are not all resident at once: a block that waits for a later one needs a "
             "cooperative launch\n");
  for (const Block* block : group.blocks) {
    const cki_sim_index& at = block->view.block_index;
    text.add("  block (%u,%u,%u)\n", at.x, at.y, at.z);
    for (u32 first = 0; first < block->thread_count();) {
      u32 end = first + 1;
      while (end < block->thread_count() && same_wait(block->threads[first], block->threads[end])) ++end;
      if (end == first + 1)
        text.add("    thread %u: ", first);
      else
        text.add("    threads %u-%u: ", first, end - 1);
      describe(block->threads[first], text);
      text.add("\n");
      first = end;
    }
  }
}

}  // namespace cki::sim
