// All-reduce by a ring.
//
// The ranks form a ring; each sends only to the next rank and receives only from the previous one. The buffer is cut
// into one chunk per rank. *Reduce-scatter*, ranks - 1 steps: in step s, rank r sends the partial result of chunk r - 1
// - s, receives that of chunk r - 2 - s and adds its own elements to it. After the last step chunk r is complete at
// rank r. *All-gather*, ranks - 1 steps: the complete chunks travel along the ring once more. By the same formula rank
// r sends chunk r - 1 - s and receives chunk r - 2 - s in step s = ranks - 1 and later. Patarasuk, Yuan, "Bandwidth
// Optimal All-reduce Algorithms for Clusters of Workstations", J. Parallel Distrib. Comput. 69(2), 2009.
//
// Each chunk travels in segments. A rank sends in each step the chunk that it received in the step before: received
// segment number t, once combined, leaves as sent segment number t + segments. There is no pause between steps or
// phases, and the first step's sends are all queued at the start.
#include <algorithm>
#include <array>

#include "algorithms/chunks.h"
#include "algorithms/over_links.h"
#include "kernels/reduce.h"

namespace ronde {
namespace {

// Receives posted at once. Each has a slot of scratch.
constexpr size_t kPostedReceives = 4;

class Ring {
 public:
  Ring(const Group& group, const Call& call, const void* in, void* out, const Reduction& reduction, Scratch& scratch,
       size_t segment_bytes)
      : group_(group),
        call_(call),
        in_(static_cast<const std::byte*>(in)),
        out_(static_cast<std::byte*>(out)),
        reduction_(reduction),
        rank_(group.rank()),
        size_(group.size()),
        chunks_(Chunks::even(call.count, group.size())),
        element_bytes_(reduction.item_bytes()) {
    const size_t longest = std::max<size_t>(chunks_[0].count, 1);
    segment_count_ = std::clamp<size_t>(segment_bytes / element_bytes_, 1, longest);
    segments_ = (longest + segment_count_ - 1) / segment_count_;
    to_reduce_ = (size_ - 1) * segments_;
    total_ = 2 * to_reduce_;
    slots_ = scratch.get(kPostedReceives * segment_count_ * element_bytes_);
  }

  void run() {
    for (size_t t = 0; t < std::min(segments_, total_); ++t) send(t);
    for (size_t t = 0; t < std::min(kPostedReceives, total_); ++t) receive(t);
    for (size_t t = 0; t < total_; ++t) {
      group_.wait(arrivals_[t % kPostedReceives]);
      if (t < to_reduce_) combine(t);
      if (t + segments_ < total_) send(t + segments_);
      if (t + kPostedReceives < total_) receive(t + kPostedReceives);
    }
    group_.wait(last_send_);
  }

 private:
  size_t step(size_t t) const { return t / segments_; }
  // The chunk sent in a step, which is also the chunk received in the step before.
  int chunk_sent(size_t step) const {
    const int back = static_cast<int>((step + 1) % size_);
    return (rank_ - back + size_) % size_;
  }
  Range segment(size_t step, size_t t) const {
    return chunks_.segment(chunk_sent(step), t % segments_, segment_count_);
  }
  size_t offset(const Range& range) const { return range.begin * element_bytes_; }
  std::byte* slot(size_t t) const { return slots_ + t % kPostedReceives * segment_count_ * element_bytes_; }

  void send(size_t t) {
    const Range range = segment(step(t), t);
    const std::byte* from = step(t) == 0 ? in_ : out_;
    last_send_ = group_.send((rank_ + 1) % size_, call_, from + offset(range), range.count * element_bytes_);
  }

  void receive(size_t t) {
    const Range range = segment(step(t) + 1, t);
    // In the second phase this may overwrite a partial result. The next rank has received that partial result: without
    // it the complete chunk would not exist.
    std::byte* to = t < to_reduce_ ? slot(t) : out_ + offset(range);
    arrivals_[t % kPostedReceives] = group_.recv((rank_ - 1 + size_) % size_, call_, to, range.count * element_bytes_);
  }

  // Adds this rank's elements to the received ones. Only the owner of a chunk, which comes last, divides.
  void combine(size_t t) {
    const Range range = segment(step(t) + 1, t);
    const bool last = step(t) + 1 == static_cast<size_t>(size_ - 1);
    const std::array<const void*, 2> sources{slot(t), in_ + offset(range)};
    reduce(last ? reduction_ : part_of(reduction_), out_ + offset(range), sources.data(), 2, range.count);
  }

  const Group& group_;
  const Call& call_;
  const std::byte* in_;
  std::byte* out_;
  const Reduction reduction_;
  const int rank_;
  const int size_;
  const Chunks chunks_;
  const size_t element_bytes_;
  size_t segment_count_;  // elements of a full segment
  size_t segments_;       // per chunk, equal for all chunks: the last segment of a shorter chunk may be empty
  size_t to_reduce_;      // the number of received segments that belong to the first phase
  size_t total_;
  std::byte* slots_;
  std::array<Transfer, kPostedReceives> arrivals_;
  Transfer last_send_;
};

}  // namespace

void allreduce_ring(const Group& group, const Call& call, const void* in, void* out, const Reduction& reduction,
                    Scratch& scratch, size_t segment_bytes) {
  if (group.size() == 1) return reduce(reduction, out, &in, 1, call.count);
  Ring(group, call, in, out, reduction, scratch, segment_bytes).run();
}

}  // namespace ronde
