// A lock-free queue of small events, in order, from the engine's threads to the timeline's writer.
//
// Any thread pushes, one thread pops. The number in a cell tells its owner: number n admits the pusher of event n, n +
// 1 the popper of that event, n + capacity the next pusher. A push to a full ring drops its event and counts it: the
// engine never waits for the writer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ronde {

struct Event {
  enum class What : uint8_t {
    kSubmitted,   // track, ns; detail: the operation (Kind)
    kTick,        // track, ns; value: the rank that submitted it at that time
    kDecided,     // track, ns; value: the place in the log of the decision
    kRefused,     // track, ns: the ranks disagree about it
    kStarted,     // source, ns; value: the number of tensors that run as one; detail: the operation (Kind)
    kMember,      // track of one of these tensors; value: the source; ns: the tensor's bytes
    kFused,       // source, ns: all of them are in the buffer
    kRan,         // source, ns: the collective is complete
    kEnded,       // source, ns: the results are at their destinations
    kCycle,       // source, ns; value: the number of tensors in one decision
    kRoundBegan,  // source, ns: a negotiation round
    kRoundEnded,  // source, ns
    kClock,       // ns: time of measurement; value: rank 0's clock minus ours, as int64_t; track: largest error in ns
  };
  int64_t ns = 0;
  uint64_t value = 0;
  uint32_t track = 0;  // or source, which is a track too
  What what = What::kSubmitted;
  uint8_t detail = 0;
};

class EventRing {
 public:
  // `capacity`: a power of two.
  explicit EventRing(size_t capacity) : cells_(capacity), mask_(capacity - 1) {
    for (size_t i = 0; i < capacity; ++i) cells_[i].number.store(i, std::memory_order_relaxed);
  }

  // Returns the event's number, counted from 1, or 0 if the ring is full. Any thread.
  uint64_t push(const Event& event) {
    uint64_t at = end_.load(std::memory_order_relaxed);
    while (true) {
      Cell& cell = cells_[at & mask_];
      const auto ahead = static_cast<int64_t>(cell.number.load(std::memory_order_acquire) - at);
      if (ahead == 0) {
        if (end_.compare_exchange_weak(at, at + 1, std::memory_order_seq_cst, std::memory_order_relaxed)) {
          cell.event = event;
          cell.number.store(at + 1, std::memory_order_release);
          return at + 1;
        }
      } else if (ahead < 0) {
        dropped_.fetch_add(1, std::memory_order_relaxed);
        return 0;
      } else {
        at = end_.load(std::memory_order_relaxed);
      }
    }
  }

  // Returns false if the ring is empty, or if the next event is still being written. One thread.
  bool pop(Event& event) {
    Cell& cell = cells_[begin_ & mask_];
    if (cell.number.load(std::memory_order_acquire) != begin_ + 1) return false;
    event = cell.event;
    cell.number.store(begin_ + mask_ + 1, std::memory_order_release);
    ++begin_;
    return true;
  }
  // Only for the thread that pops.
  bool is_empty() const { return end_.load(std::memory_order_seq_cst) == begin_; }

  size_t capacity() const { return mask_ + 1; }
  uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  struct Cell {
    std::atomic<uint64_t> number;
    Event event;
  };
  std::vector<Cell> cells_;
  size_t mask_;
  alignas(64) std::atomic<uint64_t> end_{0};
  alignas(64) uint64_t begin_ = 0;
  std::atomic<uint64_t> dropped_{0};
};

}  // namespace ronde
