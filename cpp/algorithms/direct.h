// The direct reduction, common to all-reduce, reduce and reduce-scatter. direct.cc describes its steps.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "algorithms/chunks.h"
#include "algorithms/over_links.h"

namespace ronde {

// With many ranks the segments shrink, so that the slots of all ranks together stay within about this size.
inline constexpr size_t kDirectScratchBytes = 32 << 20;

// The ranks that get the reduced chunks besides the owners.
inline constexpr int kAllRanks = -1;
inline constexpr int kNoRank = -2;

struct Results {
  int receiver;    // a rank, kAllRanks or kNoRank
  std::byte* own;  // the destination of this rank's chunk; null: this rank only sends it to the receiver
  std::byte* all;  // the destination of all ranks' chunks if this rank is a receiver
};

// Rank r reduces chunk r of all ranks' `in`, in rank order, and sends it to the receivers in `results`.
void reduce_by_owners(const Group& group, const Call& call, const Chunks& chunks, const void* in,
                      const Results& results, const Reduction& reduction, Scratch& scratch, size_t segment_bytes);

// What each rank owns in a reduction to `root`: an even share, or the root everything, which takes one step less and
// with two ranks no more bytes.
Chunks owners_of_reduction(size_t count, int size, int root, bool is_one_step = false);

// One segment of each owner's chunk, and where the segments lie: those of inputs in `in`, those of results in `all`.
struct Tick {
  const std::byte* in;
  std::byte* own;  // the destination of this rank's segment; null: this rank only sends it to the receiver
  std::byte* all;  // only of a receiver
  std::vector<std::optional<Range>> segments;  // elements, by owner; nothing: that owner has no segment in this tick
};

// The same tick by tick, for callers that do something else between them. All ranks call start(0), start(1), ... and
// finish(0), finish(1), ... in one order, start(t) at most kDepth calls before finish(t).
class DirectReduction {
 public:
  static constexpr size_t kDepth = 8;    // ticks between start and finish
  static constexpr size_t kMostLag = 2;  // ticks between finish and wait

  // `segment_count`: elements of the longest segment. `scratch` is in use until the last wait has returned.
  DirectReduction(const Group& group, const Call& call, const Reduction& reduction, int receiver, Scratch& scratch,
                  size_t segment_count);

  // Sends the contributions. The inputs must stay unchanged until wait(t) has returned.
  void start(size_t number, Tick tick);
  // Waits for the contributions, reduces them and sends the result.
  void finish(size_t number);
  // Waits until the results of the tick are where they belong, and its inputs have been sent. Call it before
  // finish(number + kMostLag + 1) and start(number + kDepth + kMostLag + 1).
  void wait(size_t number);
  // Waits for all ticks.
  void wait_for_all();

 private:
  size_t slot_index(size_t number, int rank) const { return number % kDepth * size_ + rank; }
  std::byte* slot(size_t number, int rank) const {
    return slots_ + slot_index(number, rank) * segment_count_ * std::max(element_bytes_, result_bytes_);
  }
  bool receives_results(int rank) const { return receiver_ == kAllRanks || receiver_ == rank; }
  std::span<Transfer> departures(size_t number) {  // of the contributions
    return std::span(departures_).subspan(number % (kDepth + kMostLag + 1) * static_cast<size_t>(size_), size_);
  }
  template <class Body>
  void for_each_peer(Body&& body);
  const std::byte* reduce_own(size_t number, const Tick& tick, const Range& own);

  const Group group_;
  const Call& call_;
  const Reduction reduction_;
  const int receiver_;
  const int rank_;
  const int size_;
  const size_t element_bytes_;
  const size_t result_bytes_;
  const size_t segment_count_;
  std::byte* slots_;
  std::vector<Tick> ticks_;              // by number mod depth
  std::vector<Transfer> contributions_;  // one per slot
  std::vector<Transfer> receives_;       // of results, one per slot
  std::vector<Transfer> sends_;          // the last send to each rank
  std::vector<Transfer> departures_;     // of contributions to each rank
  std::vector<Transfer> emptied_;        // the last result sent from this rank's slot, by number mod depth
  std::vector<const void*> sources_;
};

}  // namespace ronde
