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
#include <utility>

#include "kernels/reduce.h"

namespace ronde {
namespace {

constexpr size_t kMinSegmentBytes = 32 << 10;

size_t longest_segment(const Group& group, const Chunks& chunks, size_t element_bytes, size_t segment_bytes) {
  const size_t fair_bytes =
      std::max(kDirectScratchBytes / (DirectReduction::kDepth * static_cast<size_t>(group.size())), kMinSegmentBytes);
  size_t longest = 1;
  for (int owner = 0; owner < group.size(); ++owner) longest = std::max(longest, chunks[owner].count);
  return std::clamp<size_t>(std::min(segment_bytes, fair_bytes) / element_bytes, 1, longest);
}

}  // namespace

DirectReduction::DirectReduction(const Group& group, const Call& call, const Reduction& reduction, int receiver,
                                 Scratch& scratch, size_t segment_count)
    : group_(group),
      call_(call),
      reduction_(reduction),
      receiver_(receiver),
      rank_(group.rank()),
      size_(group.size()),
      element_bytes_(reduction.item_bytes()),
      result_bytes_(reduction.result_bytes()),
      segment_count_(segment_count),
      slots_(scratch.get(kDepth * size_ * segment_count_ * std::max(element_bytes_, result_bytes_))),
      ticks_(kDepth),
      contributions_(kDepth * size_),
      receives_(kDepth * size_),
      sends_(size_),
      departures_((kDepth + kMostLag + 1) * static_cast<size_t>(size_)),
      emptied_(kDepth),
      sources_(size_) {}

// Each rank begins with the next rank, so that the ranks do not all send to rank 0 first.
template <class Body>
void DirectReduction::for_each_peer(Body&& body) {
  for (int step = 1; step < size_; ++step) body((rank_ + step) % size_);
}

void DirectReduction::start(size_t number, Tick started) {
  const Tick& tick = ticks_[number % kDepth] = std::move(started);
  for_each_peer([&](int peer) {
    departures(number)[peer] = {};
    if (const auto& theirs = tick.segments[peer]) {
      departures(number)[peer] = sends_[peer] =
          group_.send(peer, call_, tick.in + theirs->begin * element_bytes_, theirs->count * element_bytes_);
    }
    if (const auto& own = tick.segments[rank_]) {
      contributions_[slot_index(number, peer)] =
          group_.recv(peer, call_, slot(number, peer), own->count * element_bytes_);
    }
  });
}

void DirectReduction::finish(size_t number) {
  const Tick& tick = ticks_[number % kDepth];
  if (const auto& own = tick.segments[rank_]) {
    const std::byte* result = reduce_own(number, tick, *own);
    for_each_peer([&](int peer) {
      if (!receives_results(peer)) return;
      sends_[peer] = group_.send(peer, call_, result, own->count * result_bytes_);
      emptied_[number % kDepth] = sends_[peer];
    });
  }
  if (!receives_results(rank_)) return;
  for_each_peer([&](int peer) {
    const auto& theirs = tick.segments[peer];
    if (!theirs) return;
    // If `in` is `out`, this overwrites the contribution sent to the owner. The owner has received it: without it the
    // result would not exist.
    std::byte* const to = tick.all + theirs->begin * result_bytes_;
    receives_[slot_index(number, peer)] = group_.recv(peer, call_, to, theirs->count * result_bytes_);
  });
}

const std::byte* DirectReduction::reduce_own(size_t number, const Tick& tick, const Range& own) {
  group_.wait(std::span(&contributions_[slot_index(number, 0)], size_));
  for (int rank = 0; rank < size_; ++rank) sources_[rank] = slot(number, rank);
  sources_[rank_] = tick.in + own.begin * element_bytes_;
  std::byte* result = tick.own;
  if (result == nullptr) {
    // This rank's own slot takes the result once the slot's previous result has been sent.
    result = slot(number, rank_);
    group_.wait(emptied_[number % kDepth]);
  }
  reduce(reduction_, result, sources_.data(), size_, own.count);
  return result;
}

void DirectReduction::wait(size_t number) {
  group_.wait(std::span(&receives_[slot_index(number, 0)], size_));
  group_.wait(departures(number));
}

void DirectReduction::wait_for_all() {
  group_.wait(sends_);
  group_.wait(receives_);
}

void reduce_by_owners(const Group& group, const Call& call, const Chunks& chunks, const void* in,
                      const Results& results, const Reduction& reduction, Scratch& scratch, size_t segment_bytes) {
  const size_t segment_count = longest_segment(group, chunks, reduction.item_bytes(), segment_bytes);
  // An owner of an empty chunk still exchanges one empty message, so that a mismatch of calls is found. If one rank
  // receives all results, its messages suffice for that, and the other owners skip theirs.
  const auto segments_of = [&](int owner) {
    const size_t segments = (chunks[owner].count + segment_count - 1) / segment_count;
    const bool checks_calls = results.receiver < 0 || results.receiver == owner;
    return segments == 0 && checks_calls ? 1 : segments;
  };
  size_t ticks = 0;
  for (int owner = 0; owner < group.size(); ++owner) ticks = std::max(ticks, segments_of(owner));
  const auto tick = [&](size_t number) {
    std::byte* const own =
        results.own == nullptr ? nullptr : results.own + number * segment_count * reduction.result_bytes();
    Tick tick{static_cast<const std::byte*>(in), own, results.all, {}};
    for (int owner = 0; owner < group.size(); ++owner) {
      const bool has_segment = number < segments_of(owner);
      tick.segments.push_back(has_segment ? std::optional(chunks.segment(owner, number, segment_count)) : std::nullopt);
    }
    return tick;
  };
  constexpr size_t kDepth = DirectReduction::kDepth;
  DirectReduction direct(group, call, reduction, results.receiver, scratch, segment_count);
  for (size_t number = 0; number < ticks + kDepth; ++number) {
    if (number >= kDepth) direct.finish(number - kDepth);
    if (number < ticks) direct.start(number, tick(number));
  }
  direct.wait_for_all();
}

}  // namespace ronde
