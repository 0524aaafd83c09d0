// Counts the cache lines that the ranks of a host make its cores move, as if each rank had a core with an endless
// cache.
//
// The sources of the data plane are compiled with the compiler's instrumentation for ThreadSanitizer, which calls a
// function before every access to memory; hooks.cc has these functions instead of ThreadSanitizer's. An access counts
//   1 if the line enters the core's cache, from memory or from another core;
//   1 if the core has the line, but must make others drop their copies before it writes.
// Arrays and scratch are cold: in no cache when a call begins, and a line that has been written counts 1 more at the
// end, when it returns to memory. The shared memory of a host is warm: its lines stay where the last call left them.
// Nothing else counts, such as stacks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ronde::testing {

inline constexpr size_t kLineBytes = 64;

// A range of memory, and for each of its lines which caches have it.
class Lines {
 public:
  void cover(std::byte* begin, size_t bytes);

  size_t offset_of(const void* address) const { return static_cast<size_t>(at(address) - begin_); }
  bool contains(const void* address) const { return offset_of(address) < bytes_; }
  // Returns how many lines of [address, address + bytes) move.
  uint64_t read(const void* address, size_t bytes, int core);
  uint64_t write(const void* address, size_t bytes, int core);
  // All caches drop the lines. Returns how many had been written.
  uint64_t flush();

 private:
  struct Line {
    std::atomic<uint64_t> cached;  // a bit per core
    std::atomic<bool> is_dirty;
  };
  static const std::byte* at(const void* address) { return static_cast<const std::byte*>(address); }
  template <class Visit>
  uint64_t each(const void* address, size_t bytes, Visit visit);

  std::byte* begin_ = nullptr;
  size_t bytes_ = 0;
  Line* lines_ = nullptr;
  std::atomic<uint64_t> dirty_{0};
};

// The memory of a host.
struct HostMemory {
  Lines slots;  // announcements, counters and bells
  size_t slot_stride = 1;
  Lines lanes;      // for staging
  Lines pipes;      // of links inside the host
  Lines arrays;     // cold
  Lines symmetric;  // cold
  std::byte* first_array = nullptr;
  std::atomic<size_t> allocated{0};
  std::atomic<uint64_t> slot_lines{0};  // moved; without messages that travel inside an announcement
  std::atomic<uint64_t> data_lines{0};  // moved, all others

  // Reserves memory for arrays.
  void reserve_arrays(size_t bytes);
  // An array on lines of its own. Any thread of the host.
  std::byte* allocate(size_t bytes);
  void free_arrays() { allocated = 0; }
  // Arrays leave all caches. Returns how many of their lines return to memory.
  uint64_t flush() { return arrays.flush() + symmetric.flush(); }
};

// For as long as it exists, the accesses of this thread count as those of a core, and its scratch lies in `arrays`.
class OnCore {
 public:
  OnCore(HostMemory& host, int core);
  ~OnCore();
  OnCore(const OnCore&) = delete;
  OnCore& operator=(const OnCore&) = delete;
};

// Accesses of this thread, for code that is not instrumented. Does nothing without an OnCore.
void count_read(const void* address, size_t bytes);
void count_write(const void* address, size_t bytes);
// The host of this thread's OnCore, or null.
HostMemory* host_of_thread();
// Those of some core. Any thread.
void count_of(HostMemory& host, int core, const void* address, size_t bytes, bool writes);

}  // namespace ronde::testing
