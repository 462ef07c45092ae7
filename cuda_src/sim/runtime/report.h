// Findings: what a launch reports. A finding names block, thread, what is wrong and the kernel's line.
#pragma once
#include <string>
#include <vector>

#include "types.h"

namespace cki::sim {

enum class Finding { Error, Hazard, Race, Bounds, Deadlock };

struct Thread;

// Text of a report while it is being written; append with printf's formats.
class Text {
 public:
  void add(const char* format, ...) __attribute__((format(printf, 2, 3)));
  void add_site(CallSite site);   // " @module+0x12": resolved to " at file:line" in Python
  const std::string& str() const { return text_; }
  bool empty() const { return text_.empty(); }
  void clear() { text_.clear(); }

 private:
  std::string text_;
};

// The same for use as a %s argument.
struct SiteText {
  explicit SiteText(CallSite site);
  char text[512];
};

// The findings of the blocks that one group runs; merged into the launch's when the group ends.
class Report {
 public:
  void clear();
  int findings() const { return findings_; }
  const std::string& text() const { return text_.str(); }
  // Repetitions of one message at one site are counted and not written again.
  bool first_time(CallSite site, const char* format);
  Text& text_to_append() { ++findings_; return text_; }

 private:
  Text text_;
  int findings_ = 0;
  std::vector<std::pair<CallSite, const char*>> seen_;
};

// The program cannot go on: writes "ERROR ...", ends the whole launch, does not return. The stack of the calling fiber is
// abandoned, so callers hold nothing on it that owns memory.
[[noreturn]] void fatal(CallSite site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The program is wrong but can go on: written when the launch asked for hazard checks, ignored otherwise.
void hazard(CallSite site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The same for a race (written when the launch asked for race checks).
void race_found(CallSite site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// An access out of bounds: like fatal, under its own heading.
[[noreturn]] void out_of_bounds(CallSite site, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace cki::sim
