// The shared memory of a communicator's ranks on one host, and its layout.
//
// First a Slot per rank: its announcements, its counters, its bell. Then each rank's staging lanes, through which
// private memory passes. Then the pipes between each two ranks (shm_link.h). All-zero memory is a valid start. Pages
// that are never touched cost nothing, so the layout may be generous.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "communicator/call.h"
#include "host/symmetric.h"
#include "links/shm_link.h"
#include "system/mapping.h"
#include "system/take_over.h"
#include "waiting/bell.h"

namespace ronde {

// Messages of up to this many bytes travel inside the announcement.
inline constexpr size_t kSmallBytes = 4 * 1024;
inline constexpr int kMaxLocalSize = 256;  // ranks per host; bounds arrays of pointers on the stack

// Where a rank's buffers of a call lie, and in which segments it can access those of the others.
struct Places {
  Place in, out;
  LiveSegments live;
};

// One rank's announcement of one call. Its owner writes it and then sets `number`; afterwards all ranks read it. The
// first cache line holds everything that a tiny message needs, because its latency is the time to read another core's
// cache line.
struct alignas(kLine) Announcement {
  std::atomic<uint64_t> number{0};  // the owner's announcements up to this one
  uint64_t value = 0;               // depends on the operation; usually a count
  Call call;
  std::byte tiny[16];
  std::byte small[kSmallBytes];
  Places places;

  std::byte* payload(size_t bytes) { return bytes <= sizeof(tiny) ? tiny : small; }
};
static_assert(offsetof(Announcement, small) == kLine);

struct Slot {
  Announcement announcements[2];  // by parity: no rank is more than one announcement ahead of a reader
  // Counters only grow, and only the owner writes them. Two lines apart, because processors prefetch lines in pairs.
  alignas(2 * kLine) std::atomic<uint64_t> staged{0};    // windows whose lanes are filled
  alignas(2 * kLine) std::atomic<uint64_t> consumed{0};  // windows whose lanes have been read (and reduced)
  alignas(2 * kLine) std::atomic<uint64_t> finished{0};  // calls on symmetric memory completed
  // If not 0, the owner has left a failed call for good, its `left`-th one on symmetric memory or a later one.
  alignas(2 * kLine) std::atomic<uint64_t> left{0};
  alignas(2 * kLine) Bell bell;
};

class HostSegment {
 public:
  // `staging_bytes`: the size of a lane on a host with two ranks. With more ranks the lanes shrink, so that one rank's
  // lanes together stay about as large as its core's cache.
  static size_t bytes(int local_size, size_t staging_bytes);
  // `memory`: at least bytes() long; shared, because ranks that are threads (in tests) share one mapping.
  HostSegment(std::shared_ptr<Mapping> memory, int local_size, size_t staging_bytes);

  int size() const { return size_; }
  size_t lane_bytes() const { return lane_bytes_; }
  Slot& slot(int local) const;
  // The lane of `writer` for `reader` in windows of this parity. The lanes of one writer and parity lie side by side,
  // so that lane(writer, parity, 0) is also one area of size() * lane_bytes().
  std::byte* lane(int writer, uint64_t parity, int reader) const;
  ShmPipe* pipe(int from, int to) const;

 private:
  int size_;
  size_t lane_bytes_;
  std::shared_ptr<Mapping> memory_;
};

}  // namespace ronde
