// Collectives among the ranks of one host, through shared memory.
//
// The four rules:
//   1. Every call begins with an announcement: each rank publishes its Call and waits for the others'. If the calls
//      differ, all ranks find out here, before a byte is combined, and the next call works again.
//   2. A rank starts call k+1 only after it has finished call k. So its announcement of k+1 means that it no longer
//      reads anything of call k, and two announcement slots (by parity) are enough.
//   3. Private memory passes through staging lanes, window by window. Each lane exists twice (by parity of the window).
//      A rank fills a lane again only after it has seen that the reader has consumed the lane's window before last.
//   4. A rank whose call has failed leaves it for good. Until the others have left, too, they may write to its
//      symmetric output. So they look for ranks that have left before each piece that they write, and the rank takes
//      its output back before the call returns (take_back_output).
//
// Counters only grow, and in a call every rank advances them by the same number of windows, so they stay equal.
// Reductions combine in rank order whatever the path, size or windows: results are bitwise equal on all ranks and in
// every run.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "communicator/call.h"
#include "host/host_segment.h"
#include "host/symmetric.h"
#include "kernels/reduction.h"
#include "links/mesh.h"
#include "waiting/bell.h"
#include "waiting/waiter.h"

namespace ronde {

// The parts of a buffer, one per local rank: sizes and offsets in bytes.
struct Parts {
  std::span<const size_t> sizes;
  std::span<const size_t> offsets;
};

// Copies a block to where it may be already, or to memory that overlaps it.
inline void move_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  if (to != from && bytes > 0) std::memmove(to, from, bytes);
}

class HostGroup {
 public:
  // `ranks`: the communicator's ranks on this host, ascending; `index`: this rank's place among them.
  HostGroup(const HostSegment& segment, const SymmetricSegments& symmetric, std::vector<int> ranks, int index,
            std::vector<BellHandle> bell_handles, Waiter& waiter);

  int size() const { return segment_.size(); }
  int index() const { return index_; }

  // While it exists, the waits of the group also drive links: messages to and from other hosts move meanwhile.
  class Driving {
   public:
    Driving(HostGroup& group, Mesh& links) : group_(group) { group.links_ = &links; }
    ~Driving() { group_.links_ = nullptr; }
    Driving(const Driving&) = delete;
    Driving& operator=(const Driving&) = delete;

   private:
    HostGroup& group_;
  };

  // Rule 1 alone: a barrier that also compares calls. Throws MismatchError, Failure.
  void announce(const Call& call);

  // The same for algorithms that access the buffers directly: returns the addresses of all ranks' buffers if all of
  // them lie in symmetric memory, else nothing. A rank that gets addresses must call release_buffers() at the end.
  struct Buffers {
    std::vector<const std::byte*> in;
    std::vector<std::byte*> out;
    std::unique_ptr<SymmetricSegments::Pin> pin;
  };
  Buffers announce(const Call& call, const void* in, void* out, size_t bytes);
  // Returns when all ranks have called it: from then on no other rank accesses the buffers.
  void release_buffers() { finish_symmetric(); }
  // Calls write(begin, bytes) for one piece after another of `bytes` bytes, which go to as many buffers of other ranks.
  // Throws Failure if a rank has left the call: from then on its buffer may hold other data.
  template <class Write>
  void write_in_pieces(size_t bytes, size_t buffers, Write&& write) const {
    const size_t most = kWrittenBytes / std::bit_ceil(buffers);
    for (size_t begin = 0; begin < bytes; begin += most) {
      check_presence();
      write(begin, std::min(most, bytes - begin));
    }
  }

  // The end of a failed call. leave(): from here on this rank accesses no buffer of others and makes no call.
  // take_back_output(): returns when no other rank can change this rank's output. It waits a moment for the others to
  // leave, except for those of which `has_gone` is true. If one does not leave, because it is stopped, the output's
  // pages are replaced by a private copy at the same address.
  void leave();
  void take_back_output(FunctionRef<bool(int)> has_gone);

  // Gathers every rank's `value`, in rank order.
  void exchange(const Call& call, uint64_t value, std::span<uint64_t> values);

  // Element-wise reduction; every rank gets the result in `out`, which may be `in` but must not overlap it otherwise.
  // The result's type may differ from the input's if the input fits into kSmallBytes, and in reduce_scatter(); then
  // `out` must not be `in`.
  void allreduce(const Call& call, const Reduction& reduction, const void* in, void* out, size_t count);
  // The same, with the result on local rank `root` only (`out` may be null elsewhere).
  void reduce(const Call& call, const Reduction& reduction, const void* in, void* out, size_t count, int root);
  // Rank p gets counts[p] elements of the reduction, those from offsets[p] on, in `out`. `out` may be exactly that part
  // of `in`. Offsets ascend, and parts do not overlap; by default they lie one behind the other.
  void reduce_scatter(const Call& call, const Reduction& reduction, const void* in, std::span<const size_t> counts,
                      std::span<const size_t> offsets, void* out);
  void reduce_scatter(const Call& call, const Reduction& reduction, const void* in, std::span<const size_t> counts,
                      void* out);

  // Copies rank p's `in` (sizes[p] bytes) to out + offsets[p] on every rank, or only on rank `reader` if it is >= 0.
  // `in` may be out + offsets[own].
  void share(const Call& call, const void* in, void* out, const Parts& parts, int reader = -1);

  // Copies this rank's from.sizes[p] bytes at in + from.offsets[p] to rank p, at the to.offsets[own] of that rank's
  // `out`.
  void deal(const Call& call, const void* in, const Parts& from, void* out, const Parts& to);

  // Gather and all-gather, all-to-all, and scatter in two steps, if not every rank knows all sizes. The first step
  // tells them. If are_carried() after it, the blocks have come along, and the second step is the take_... below it,
  // before any other call. Otherwise it is share() or deal(). All ranks get the same answer.
  bool are_carried() const { return are_carried_; }
  // Rank p's `in` has rows_of_ranks[p] rows of `row_bytes` bytes.
  void tell_rows(const Call& call, const void* in, uint64_t rows, size_t row_bytes, std::span<uint64_t> rows_of_ranks);
  void take_rows(const void* in, void* out, const Parts& parts, int reader = -1);
  // `in` has rows[p] rows for rank p; arriving[p] rows come from rank p.
  void tell_splits(const Call& call, const void* in, std::span<const uint64_t> rows, size_t row_bytes,
                   std::span<uint64_t> arriving);
  void take_splits(const void* in, const Parts& from, void* out, const Parts& to);
  // `words`: those of rank call.root, at the end on all ranks. Only the root has `in`, with sizes[p] bytes for rank p.
  // They are a type and the lengths of at least one axis.
  static constexpr size_t kFewestWords = 2, kMostWords = 65;
  // Throws ProtocolError if `sender`, a rank of the communicator, has told another number of words.
  static void check_word_count(int64_t count, int sender);
  void tell_words(const Call& call, std::vector<int64_t>& words, const void* in, std::span<const size_t> sizes);
  void take_block(int root, const void* in, std::span<const size_t> sizes, void* out);

  // The ranks that this one waits for in the current call. For error messages, in the calling thread.
  std::vector<int> missing() const;

 private:
  Announcement& announcement(int local) const { return segment_.slot(local).announcements[announced_ & 1]; }
  void exchange_announcements(const Call& call, uint64_t value, const Places* places = nullptr,
                              const void* small = nullptr, size_t small_bytes = 0);
  // Where this rank writes the message of its next announcement.
  std::byte* next_message() const { return segment_.slot(index_).announcements[(announced_ + 1) & 1].small; }
  // A part of another rank's message, whose place that rank has told. Throws ProtocolError if it lies elsewhere.
  std::byte* part_of_message(int local, size_t offset, size_t bytes) const;
  // Copies a part of another rank's message.
  void take(std::byte* message, size_t bytes, std::byte* to) const;
  void compare_calls();
  void ring_all();
  // The places of this rank's buffers, for its announcement. They must be pinned from here to the end of the call.
  Places places_of(const void* in, size_t in_bytes, const void* out = nullptr, size_t out_bytes = 0) const;
  // From the next announcement on other ranks may write to this rank's output buffer. cover_output(): no longer.
  void expose_output(const Place& out, size_t bytes);
  void cover_output() { exposure_ = {}; }
  // Throws Failure if a rank of this host has left this call.
  void check_presence() const;
  bool may_write(int local) const;
  // Whether all ranks can access this buffer of all ranks, and one of them has bytes. The same on all of them.
  bool is_symmetric(Place Places::* buffer) const;
  // The address of `bytes` bytes from `offset` on, in the input of rank `local`, which must be symmetric.
  const std::byte* input_of(int local, size_t offset, size_t bytes) const;

  // The common body of allreduce and reduce: the result on rank `only`, or on all ranks if it is < 0.
  void reduce_any(const Call& call, const Reduction& reduction, const void* in, void* out, size_t count, int only);
  // Reduces elements [begin, begin + count) of the `total` ones in every announcement. `own`: this rank's, in `in`.
  void reduce_small(const Reduction& reduction, const void* own, void* out, size_t total, size_t begin, size_t count);
  void reduce_symmetric(const Reduction& reduction, size_t count, int only);
  void reduce_by_lanes(const Reduction& reduction, const std::byte* in, std::byte* out, size_t count, int only);
  void reduce_scatter_staged(const Reduction& reduction, const std::byte* in, std::span<const size_t> counts,
                             std::span<const size_t> offsets, std::byte* out);

  void share_staged(const std::byte* in, std::byte* out, const Parts& parts, int reader);
  void share_symmetric(std::byte* out, const Parts& parts, int reader);
  // In a deal, a rank's blocks for the others travel in its announcement if none is larger than small_block_bytes():
  // one behind the other, each with room for the largest.
  size_t others() const { return static_cast<size_t>(size()) - 1; }
  size_t small_block_bytes() const { return kSmallBytes / std::max(others(), size_t{1}); }
  size_t small_payload_bytes(size_t largest) const { return others() * largest; }
  static size_t small_block_index(int writer, int reader) { return size_t(reader < writer ? reader : reader - 1); }
  void deal_symmetric(std::byte* out, const Parts& to);
  void deal_staged(const std::byte* in, const Parts& from, std::byte* out, const Parts& to, size_t largest);

  template <class Step>
  void wait_until(Step&& step);
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
  std::vector<BellHandle> bell_handles_;
  Waiter& waiter_;
  Mesh* links_ = nullptr;  // that waits drive

  uint64_t announced_ = 0;    // announcements made; the same on every rank between calls
  bool are_carried_ = false;  // the last announcements tell sizes and have the blocks
  uint64_t windows_ = 0;      // windows passed; the same on every rank between calls
  uint64_t finished_ = 0;     // calls on symmetric memory; the same on every rank between calls

  // The bytes between two looks for ranks that have left: writing them takes much longer than a look, and much less
  // than a rank waits for it.
  static constexpr size_t kWrittenBytes = size_t{1} << 20;
  struct {
    uint64_t announced = 0;  // the announcement that tells the buffer's place; 0: no rank may write to it
    Place out;
    size_t bytes = 0;
  } exposure_;

  struct {
    const std::atomic<uint64_t>* word = nullptr;
    uint64_t value = 0;
    int rank = -1;
  } awaited_;  // the counter of the last wait
};

}  // namespace ronde
