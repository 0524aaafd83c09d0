#include "traffic/cores.h"

#include <sys/mman.h>

#include "check.h"
#include "host/host_segment.h"

namespace ronde::testing {
namespace {

thread_local HostMemory* my_host = nullptr;
thread_local int my_core = 0;

std::byte* reserve(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(memory != MAP_FAILED);
  return static_cast<std::byte*>(memory);
}

// Whether the address lies in the part of an announcement for messages that travel in it, behind the first line.
bool is_small_message(const HostMemory& host, const void* address) {
  const size_t offset = host.slots.offset_of(address) % host.slot_stride;
  const size_t in_announcement = offset % sizeof(Announcement);
  return offset < 2 * sizeof(Announcement) && in_announcement >= offsetof(Announcement, small) &&
         in_announcement < offsetof(Announcement, places);
}

void count(HostMemory& host, int core, const void* address, size_t bytes, bool writes) {
  const auto count_in = [&](Lines& lines, std::atomic<uint64_t>& moved) {
    if (!lines.contains(address)) return false;
    moved.fetch_add(writes ? lines.write(address, bytes, core) : lines.read(address, bytes, core));
    return true;
  };
  if (host.slots.contains(address)) {
    count_in(host.slots, is_small_message(host, address) ? host.data_lines : host.slot_lines);
    return;
  }
  for (Lines* lines : {&host.lanes, &host.arrays, &host.symmetric, &host.pipes}) {
    if (count_in(*lines, host.data_lines)) return;
  }
}

}  // namespace

void Lines::cover(std::byte* begin, size_t bytes) {
  begin_ = begin;
  bytes_ = bytes;
  lines_ = reinterpret_cast<Line*>(reserve((bytes / kLineBytes + 1) * sizeof(Line)));  // zeros: in no cache
}

template <class Visit>
uint64_t Lines::each(const void* address, size_t bytes, Visit visit) {
  if (bytes == 0) return 0;
  const auto offset = static_cast<size_t>(at(address) - begin_);
  uint64_t moved = 0;
  for (size_t line = offset / kLineBytes; line <= (offset + bytes - 1) / kLineBytes; ++line) {
    moved += visit(lines_[line]);
  }
  return moved;
}

uint64_t Lines::read(const void* address, size_t bytes, int core) {
  const uint64_t own = uint64_t{1} << core;
  return each(address, bytes, [own](Line& line) -> uint64_t {
    if (line.cached.load(std::memory_order_relaxed) & own) return 0;
    line.cached.fetch_or(own, std::memory_order_relaxed);
    return 1;
  });
}

uint64_t Lines::write(const void* address, size_t bytes, int core) {
  const uint64_t own = uint64_t{1} << core;
  return each(address, bytes, [this, own](Line& line) -> uint64_t {
    if (!line.is_dirty.load(std::memory_order_relaxed) && !line.is_dirty.exchange(true)) ++dirty_;
    if (line.cached.load(std::memory_order_relaxed) == own) return 0;
    line.cached.store(own, std::memory_order_relaxed);
    return 1;
  });
}

uint64_t Lines::flush() {
  // The pages become zeros.
  CHECK(bytes_ == 0 || madvise(lines_, (bytes_ / kLineBytes + 1) * sizeof(Line), MADV_DONTNEED) == 0);
  return dirty_.exchange(0);
}

void HostMemory::reserve_arrays(size_t bytes) {
  first_array = reserve(bytes);
  arrays.cover(first_array, bytes);
}

std::byte* HostMemory::allocate(size_t bytes) {
  const size_t begin = allocated.fetch_add((bytes + kLineBytes - 1) / kLineBytes * kLineBytes);
  CHECK(arrays.contains(first_array + begin + bytes));
  return first_array + begin;
}

OnCore::OnCore(HostMemory& host, int core) {
  my_host = &host;
  my_core = core;
}

OnCore::~OnCore() { my_host = nullptr; }

HostMemory* host_of_thread() { return my_host; }

void count_read(const void* address, size_t bytes) {
  if (my_host != nullptr) count(*my_host, my_core, address, bytes, false);
}

void count_write(const void* address, size_t bytes) {
  if (my_host != nullptr) count(*my_host, my_core, address, bytes, true);
}

void count_of(HostMemory& host, int core, const void* address, size_t bytes, bool writes) {
  count(host, core, address, bytes, writes);
}

}  // namespace ronde::testing
