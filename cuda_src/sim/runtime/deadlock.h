// The report of a group in which no thread can run: what each thread waits for, and where.
#pragma once

namespace cki::sim {

struct Group;
void report_deadlock(Group& group);

}  // namespace cki::sim
