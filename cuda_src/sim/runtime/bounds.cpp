// Looks up an address among everything that a kernel may touch.
#include "bounds.h"

#include <algorithm>
#include <dlfcn.h>
#include <link.h>

#include "launch.h"
#include "scheduler.h"

namespace cki::sim {

namespace {

bool inside(const u8* pointer, std::size_t bytes, const void* begin, std::size_t size) {
  const std::size_t offset = static_cast<std::size_t>(pointer - static_cast<const u8*>(begin));
  return offset < size && bytes <= size - offset;
}

struct FindModule {
  const u8* code;
  std::vector<std::pair<const u8*, std::size_t>> segments;
};

int find_module(dl_phdr_info* info, std::size_t, void* data) {
  FindModule& find = *static_cast<FindModule*>(data);
  std::vector<std::pair<const u8*, std::size_t>> segments;
  bool found = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const u8* begin = reinterpret_cast<const u8*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    segments.emplace_back(begin, info->dlpi_phdr[i].p_memsz);
    found |= inside(find.code, 1, begin, info->dlpi_phdr[i].p_memsz);
  }
  if (found) find.segments = std::move(segments);
  return found;
}

}  // namespace

void Bounds::set(const cki_sim_extent* extents, u64 count, const void* code_of_module) {
  for (u64 i = 0; i < count; ++i) {
    const u8* begin = static_cast<const u8*>(extents[i].address);
    if (extents[i].bytes) tensors_.push_back({begin, begin + extents[i].bytes});
  }
  std::sort(tensors_.begin(), tensors_.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::size_t kept = 0;
  for (const Range& range : tensors_) {
    if (kept && range.begin <= tensors_[kept - 1].end)
      tensors_[kept - 1].end = std::max(tensors_[kept - 1].end, range.end);
    else
      tensors_[kept++] = range;
  }
  tensors_.resize(kept);
  FindModule find{static_cast<const u8*>(code_of_module), {}};
  dl_iterate_phdr(find_module, &find);
  for (const auto& segment : find.segments) module_.push_back({segment.first, segment.first + segment.second});
}

bool Bounds::covered(const u8* pointer, std::size_t bytes) const {
  const auto after = std::upper_bound(tensors_.begin(), tensors_.end(), pointer,
                                      [](const u8* p, const Range& range) { return p < range.begin; });
  if (after != tensors_.begin()) {
    const Range& range = *(after - 1);
    if (pointer < range.end && bytes <= static_cast<std::size_t>(range.end - pointer)) return true;
  }
  const Thread& thread = current_thread();
  if (inside(pointer, bytes, thread.block->stacks[thread.index()], kStackBytes)) return true;
  if (inside(pointer, bytes, &thread, sizeof thread) || inside(pointer, bytes, &cki_sim_block, sizeof cki_sim_block) ||
      inside(pointer, bytes, &cki_sim_thread, sizeof cki_sim_thread) ||
      inside(pointer, bytes, &thread.block->group->progress, sizeof(u32)))
    return true;
  for (const Range& range : module_)
    if (pointer >= range.begin && pointer < range.end) return true;
  return false;
}

void Bounds::check(const void* pointer, std::size_t bytes, bool write, CallSite site) const {
  const u8* at = static_cast<const u8*>(pointer);
  if (tensors_.empty() || covered(at, bytes)) return;
  // Name the nearest tensor: most faults lie just beyond one.
  const Range* nearest = &tensors_.front();
  auto distance = [at](const Range& range) { return at < range.begin ? range.begin - at : at - range.end; };
  for (const Range& range : tensors_)
    if (distance(range) < distance(*nearest)) nearest = &range;
  if (at < nearest->begin)
    out_of_bounds(site, "%s of %zu bytes, %td bytes before a tensor of %td bytes", write ? "write" : "read", bytes,
                  nearest->begin - at, nearest->end - nearest->begin);
  out_of_bounds(site, "%s of %zu bytes at offset %td of a tensor of %td bytes", write ? "write" : "read", bytes,
                at - nearest->begin, nearest->end - nearest->begin);
}

void check_global(const void* pointer, std::size_t bytes, bool write, CallSite site) {
  const Group& group = *running_group();
  if (group.checks.bounds && bytes) group.launch->bounds.check(pointer, bytes, write, site);
}

}  // namespace cki::sim
