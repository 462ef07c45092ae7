// Writing findings. Each starts with its kind, the block and the thread, and ends with the kernel's call site.
#include "report.h"

#include <cstdarg>
#include <cstdio>
#include <dlfcn.h>

#include "scheduler.h"

namespace cki::sim {

void Text::add(const char* format, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  text_ += buffer;
}

SiteText::SiteText(CallSite site) {
  text[0] = '\0';
  Dl_info info;
  if (!site || !dladdr(site, &info) || !info.dli_fname) return;
  // A return address is one past the call: step back into it.
  std::snprintf(text, sizeof text, " @%s+0x%zx", info.dli_fname,
                static_cast<std::size_t>(static_cast<const u8*>(site) - 1 - static_cast<const u8*>(info.dli_fbase)));
}

void Text::add_site(CallSite site) { text_ += SiteText(site).text; }

void Report::clear() {
  text_.clear();
  findings_ = 0;
  seen_.clear();
}

bool Report::first_time(CallSite site, const char* format) {
  for (const auto& earlier : seen_)
    if (earlier.first == site && earlier.second == format) return false;
  seen_.emplace_back(site, format);
  return true;
}

namespace {

const char* name(Finding kind) {
  switch (kind) {
    case Finding::Error: return "ERROR";
    case Finding::Hazard: return "HAZARD";
    case Finding::Race: return "RACE";
    case Finding::Bounds: return "OUT OF BOUNDS";
    case Finding::Deadlock: return "DEADLOCK";
  }
  return "";
}

void write(Finding kind, CallSite site, const char* format, va_list arguments) {
  Group& group = *running_group();
  Text& text = group.report.text_to_append();
  if (inside_kernel()) {
    const Thread& thread = current_thread();
    const cki_sim_index& at = thread.block->view.block_index;
    text.add("%s block (%u,%u,%u) thread %u: ", name(kind), at.x, at.y, at.z, thread.index());
  } else {
    text.add("%s in asynchronous work: ", name(kind));
  }
  char message[768];
  std::vsnprintf(message, sizeof message, format, arguments);
  text.add("%s", message);
  text.add_site(site);
  text.add("\n");
}

}  // namespace

void fatal(CallSite site, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  write(Finding::Error, site, format, arguments);
  va_end(arguments);
  abandon_group(*running_group());
}

void out_of_bounds(CallSite site, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  write(Finding::Bounds, site, format, arguments);
  va_end(arguments);
  abandon_group(*running_group());
}

void hazard(CallSite site, const char* format, ...) {
  Group& group = *running_group();
  if (!group.checks.hazards || !group.report.first_time(site, format)) return;
  va_list arguments;
  va_start(arguments, format);
  write(Finding::Hazard, site, format, arguments);
  va_end(arguments);
}

void race_found(CallSite site, const char* format, ...) {
  Group& group = *running_group();
  if (!group.checks.races || !group.report.first_time(site, format)) return;
  va_list arguments;
  va_start(arguments, format);
  write(Finding::Race, site, format, arguments);
  va_end(arguments);
}

}  // namespace cki::sim
