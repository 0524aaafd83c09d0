// Direct reduction.
//
// Every rank owns one chunk of the buffer. First step, *contribute*: each rank sends each owner its elements of the
// owner's chunk; the owner combines all contributions in rank order. Second step, *result*: each owner sends its chunk
// to the receivers of the operation. No byte travels twice, and a sum is rounded only when it is complete, so the
// result depends neither on segments nor on timing. Contributions and results may have different types (reduction.h).
// The algorithm is the reduce-scatter by pairwise exchange of Thakur, Rabenseifner, Gropp, "Optimization of Collective
// Communication Operations in MPICH", IJHPCA 19(1), 2005, section on reduce-scatter, with all partners served at once,
// followed by a direct exchange of the results.
//
// Both steps work in segments and overlap. The sender and the receiver of a link must agree on the order of its
// messages without communication, so there is one schedule: at tick t every rank finishes its own segment t - depth
// (waits for all contributions, reduces, sends the result) and then starts segment t of every chunk (sends its
// contributions, posts the receives for its own chunk). Between start and finish, `depth` segments per link are in
// flight: while the owner reduces one, the others fill the wire. Contributions arrive in slot t mod depth of a scratch
// buffer, which is free again once segment t - depth is finished, so the scratch is bounded whatever the size of the
// buffer.
#include "algorithms/direct.h"

#include <algorithm>
#include <vector>

#include "reduce.h"

namespace ronde {
namespace {

constexpr size_t kDepth = 8;
// With many ranks the segments shrink, so that the slots of all ranks together stay within about this size.
constexpr size_t kScratchBytes = 32 << 20;
constexpr size_t kMinSegmentBytes = 32 << 10;

class DirectReduction {
 public:
  DirectReduction(const Group& group, const Call& call, const Chunks& chunks, const void* in, const Results& results,
                  const Reduction& reduction, Scratch& scratch, size_t segment_bytes)
      : group_(group),
        call_(call),
        chunks_(chunks),
        in_(static_cast<const std::byte*>(in)),
        results_(results),
        reduction_(reduction),
        rank_(group.rank()),
        size_(group.size()),
        element_bytes_(reduction.item_bytes()),
        result_bytes_(reduction.result_bytes()) {
    const size_t fair_bytes = std::max(kScratchBytes / (kDepth * size_), kMinSegmentBytes);
    size_t longest = 1;
    for (int owner = 0; owner < size_; ++owner) longest = std::max(longest, chunks[owner].count);
    segment_count_ = std::clamp<size_t>(std::min(segment_bytes, fair_bytes) / element_bytes_, 1, longest);
    ticks_ = 0;
    for (int owner = 0; owner < size_; ++owner) ticks_ = std::max(ticks_, segments_of(owner));
    slots_ = scratch.get(kDepth * size_ * segment_count_ * std::max(element_bytes_, result_bytes_));
    contributions_.resize(kDepth * size_);
    sends_.resize(size_);
    receives_.resize(size_);
    departures_.resize(kDepth);
    sources_.resize(size_);
  }

  void run() {
    for (size_t tick = 0; tick < ticks_ + kDepth; ++tick) {
      if (tick >= kDepth) finish(tick - kDepth);
      if (tick < ticks_) start(tick);
    }
    group_.wait(sends_);
    group_.wait(receives_);
  }

 private:
  // An owner of an empty chunk still exchanges one empty message, so that a mismatch of calls is found. If one rank
  // receives all results, its messages suffice for that, and the other owners skip theirs.
  size_t segments_of(int owner) const {
    const size_t segments = (chunks_[owner].count + segment_count_ - 1) / segment_count_;
    const bool checks_calls = results_.receiver < 0 || results_.receiver == owner;
    return segments == 0 && checks_calls ? 1 : segments;
  }

  size_t bytes(const Range& range) const { return range.count * element_bytes_; }
  size_t offset(const Range& range) const { return range.begin * element_bytes_; }
  Range segment(int owner, size_t tick) const { return chunks_.segment(owner, tick, segment_count_); }
  bool receives_results(int rank) const { return results_.receiver == kAllRanks || results_.receiver == rank; }

  size_t slot_index(size_t tick, int rank) const { return tick % kDepth * size_ + rank; }
  std::byte* slot(size_t tick, int rank) const {
    return slots_ + slot_index(tick, rank) * segment_count_ * std::max(element_bytes_, result_bytes_);
  }

  // Each rank begins with the next rank, so that the ranks do not all send to rank 0 first.
  template <class Body>
  void for_each_peer(Body&& body) {
    for (int step = 1; step < size_; ++step) body((rank_ + step) % size_);
  }

  void start(size_t tick) {
    for_each_peer([&](int peer) {
      if (tick < segments_of(peer)) {
        const Range theirs = segment(peer, tick);
        sends_[peer] = group_.send(peer, call_, in_ + offset(theirs), bytes(theirs));
      }
      if (tick < segments_of(rank_)) {
        contributions_[slot_index(tick, peer)] =
            group_.recv(peer, call_, slot(tick, peer), bytes(segment(rank_, tick)));
      }
    });
  }

  void finish(size_t tick) {
    if (tick < segments_of(rank_)) {
      const std::byte* result = reduce_own(tick);
      for_each_peer([&](int peer) {
        if (!receives_results(peer)) return;
        sends_[peer] = group_.send(peer, call_, result, segment(rank_, tick).count * result_bytes_);
        departures_[tick % kDepth] = sends_[peer];
      });
    }
    if (!receives_results(rank_)) return;
    for_each_peer([&](int peer) {
      if (tick >= segments_of(peer)) return;
      // If `in` is `out`, this overwrites the contribution sent to the owner. The owner has received it: without it the
      // result would not exist.
      const Range theirs = segment(peer, tick);
      std::byte* const to = results_.all + theirs.begin * result_bytes_;
      receives_[peer] = group_.recv(peer, call_, to, theirs.count * result_bytes_);
    });
  }

  const std::byte* reduce_own(size_t tick) {
    group_.wait(std::span(&contributions_[slot_index(tick, 0)], size_));
    const Range own = segment(rank_, tick);
    for (int rank = 0; rank < size_; ++rank) sources_[rank] = slot(tick, rank);
    sources_[rank_] = in_ + offset(own);
    std::byte* result;
    if (results_.own != nullptr) {
      result = results_.own + (own.begin - chunks_[rank_].begin) * result_bytes_;
    } else {
      // This rank's own slot takes the result once the slot's previous result has been sent.
      result = slot(tick, rank_);
      group_.wait(departures_[tick % kDepth]);
    }
    reduce(reduction_, result, sources_.data(), size_, own.count);
    return result;
  }

  const Group& group_;
  const Call& call_;
  const Chunks& chunks_;
  const std::byte* in_;
  const Results& results_;
  const Reduction reduction_;
  const int rank_;
  const int size_;
  const size_t element_bytes_;
  const size_t result_bytes_;
  size_t segment_count_;  // elements of a full segment
  size_t ticks_;          // segments of the longest chunk
  std::byte* slots_;
  std::vector<Transfer> contributions_;  // one per slot
  std::vector<Transfer> sends_;          // the last send to each rank
  std::vector<Transfer> receives_;       // the last result from each rank
  std::vector<Transfer> departures_;     // the last result sent from this rank's slot, by tick mod depth
  std::vector<const void*> sources_;
};

}  // namespace

void reduce_by_owners(const Group& group, const Call& call, const Chunks& chunks, const void* in,
                      const Results& results, const Reduction& reduction, Scratch& scratch, size_t segment_bytes) {
  DirectReduction(group, call, chunks, in, results, reduction, scratch, segment_bytes).run();
}

}  // namespace ronde
