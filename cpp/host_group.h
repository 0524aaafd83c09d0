// Collectives among the ranks of one host, through shared memory.
//
// The three rules:
//   1. Every call begins with an announcement: each rank publishes its Call and waits for everyone else's. Ranks that
//      disagree find out here, all of them alike, before a byte is combined; the next call works again.
//   2. Nobody starts call k+1 before it has finished call k. So an announcement of k+1 says that its owner no longer
//      reads anything of call k, and two announcement slots (by parity) are enough.
//   3. Private memory passes through staging lanes, window by window, each lane twice (by parity of the window). Before
//      a rank fills a lane again it has seen that the reader has consumed it two windows ago.
//
// Counters only grow and every rank advances them by the same number of windows in a call, so they stay aligned.
// Reductions go in rank order whatever the path, size or windows: results are bitwise the same on all ranks, and the
// same again in every run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bell.h"
#include "call.h"
#include "host_segment.h"
#include "reduction.h"
#include "symmetric.h"
#include "waiter.h"

namespace ronde {

// Where each rank's part of a buffer lies: sizes and offsets in bytes, one per local rank.
struct Parts {
  std::span<const size_t> sizes;
  std::span<const size_t> offsets;
};

class HostGroup {
 public:
  // `ranks`: the ranks of this host in the communicator, ascending; `index`: which of them this one is.
  HostGroup(const HostSegment& segment, const SymmetricSegments& symmetric, std::vector<int> ranks, int index,
            std::vector<BellRope> ropes, Waiter& waiter);

  int size() const { return segment_.size(); }
  int index() const { return index_; }

  // Rule 1 on its own: a barrier that also compares calls. Throws MismatchError, Failure.
  void announce(const Call& call);

  // The same, for algorithms that see to the rest themselves: where every rank's buffers lie, if all of them lie in
  // symmetric memory, else nothing. Whoever gets addresses ends with leave().
  struct Buffers {
    std::vector<const std::byte*> in;
    std::vector<std::byte*> out;
  };
  Buffers announce(const Call& call, const void* in, void* out, size_t bytes);
  // Returns when all ranks have called it: nobody looks into the buffers any more.
  void leave() { finish_symmetric(); }

  // Every rank's `value`, in rank order.
  void exchange(const Call& call, uint64_t value, std::span<uint64_t> values);

  // Element-wise reduction over all ranks; `out` on all of them. in == out is allowed, other overlap is not. The result
  // may be of another type than the input in what fits into kSmallBytes, and in reduce_scatter(); then no overlap is.
  void allreduce(const Call& call, const Reduction& reduction, const void* in, void* out, size_t count);
  // The same with the result at local rank `root` only (`out` may be null elsewhere).
  void reduce(const Call& call, const Reduction& reduction, const void* in, void* out, size_t count, int root);
  // Rank p gets elements [offsets[p], offsets[p] + counts[p]) of the reduction, written to `out`.
  // `out` may be exactly that part of `in`.
  void reduce_scatter(const Call& call, const Reduction& reduction, const void* in, std::span<const size_t> counts,
                      void* out);

  // Rank p's `in` (sizes[p] bytes) arrives at out + offsets[p] on every rank, or with `reader` >= 0 at that one only.
  // `in` may be out + offsets[own].
  void share(const Call& call, const void* in, void* out, const Parts& parts, int reader = -1);

  // This rank's bytes [from.offsets[p], + from.sizes[p]) of `in` arrive at rank p, at its to.offsets[own].
  void deal(const Call& call, const void* in, const Parts& from, void* out, const Parts& to);

  // The ranks that this one is waiting for in the call in progress; for reports, by the calling thread.
  std::vector<int> missing() const;

 private:
  Announcement& announcement(int local) const { return segment_.slot(local).announcements[announced_ & 1]; }
  void open(const Call& call, uint64_t value, Place in, Place out, const void* small, size_t small_bytes);
  void compare_calls() const;
  void ring_all();
  bool is_symmetric_in() const;
  bool is_symmetric_in_and_out() const;

  // The whole reduction on rank `only` (everywhere if < 0): the shared body of allreduce and reduce.
  void reduce_any(const Call& call, const Reduction& reduction, const void* in, void* out, size_t count, int only);
  void reduce_small(const Reduction& reduction, const void* in, void* out, size_t count);
  void reduce_symmetric(const Reduction& reduction, size_t count);
  void reduce_staged(const Reduction& reduction, const std::byte* in, std::byte* out, size_t count, int only);
  void reduce_scatter_staged(const Reduction& reduction, const std::byte* in, std::span<const size_t> counts,
                             std::span<const size_t> offsets, std::byte* out);

  void share_staged(const std::byte* in, std::byte* out, const Parts& parts, int reader);
  void share_symmetric(std::byte* out, const Parts& parts);
  void deal_staged(const std::byte* in, const Parts& from, std::byte* out, const Parts& to, size_t largest);

  using Counter = std::atomic<uint64_t> Slot::*;
  void publish(Counter counter, uint64_t value);
  void wait_for(Counter counter, int local, uint64_t value);
  void wait_for_all(Counter counter, uint64_t value);
  void finish_symmetric();
  std::byte* lane(int writer, uint64_t window, int reader) const { return segment_.lane(writer, window, reader); }

  const HostSegment& segment_;
  const SymmetricSegments& symmetric_;
  std::vector<int> ranks_;
  int index_;
  std::vector<BellRope> ropes_;
  Waiter& waiter_;

  uint64_t announced_ = 0;  // announcements made; the same on every rank between calls
  uint64_t windows_ = 0;    // windows passed; the same on every rank between calls
  uint64_t finished_ = 0;   // calls on symmetric memory; the same on every rank between calls

  struct {
    const std::atomic<uint64_t>* word = nullptr;
    uint64_t value = 0;
    int rank = -1;
  } awaited_;  // the counter that was last waited for
};

}  // namespace ronde
