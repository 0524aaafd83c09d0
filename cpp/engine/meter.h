// Measures the throughput of tensors, for tuning. Only rank 0 does.
//
// The measured time is the busy time, in which at least one tensor is pending: from a submission to an idle engine
// until all tensors are finished. Idle time belongs to the program, and batching cannot change it. Computation while
// tensors are pending counts, because the end of the last tensor matters.
//
// A sample consists of whole steps of the program. The first decided tensor is the marker: a step ends when it comes
// again. Another tensor that comes kOften times meanwhile becomes the marker. A sample has at least kLeastNs of busy
// time, so that the resolution of the clock and the scheduler do not matter.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/steady_clock.h"

namespace ronde {

class Meter {
 public:
  struct Sample {
    uint64_t bytes;
    int64_t busy_ns;
    uint64_t steps;
  };

  // Discards all samples and takes `samples` new ones of at least `steps` steps each. 0 samples: stops measuring.
  void start(uint64_t steps, size_t samples) {
    const std::lock_guard lock(mutex_);
    steps_wanted_ = steps;
    samples_wanted_ = samples;
    samples_.clear();
    marker_ = kNone;
    is_on_.store(samples > 0, std::memory_order_relaxed);
  }
  bool is_on() const { return is_on_.load(std::memory_order_relaxed); }

  // Returns all samples, once, when they are complete; none before.
  std::vector<Sample> take_samples() {
    const std::lock_guard lock(mutex_);
    if (samples_.size() < samples_wanted_) return {};
    samples_wanted_ = 0;
    return std::move(samples_);
  }

  // submitted(): a tensor becomes pending. ended(): it is finished, or will not run.
  void submitted() {
    const std::lock_guard lock(mutex_);
    if (pending_++ == 0) busy_since_ = steady_now_ns();
  }
  void ended() {
    const std::lock_guard lock(mutex_);
    if (--pending_ == 0) busy_ns_ += steady_now_ns() - busy_since_;
  }

  // A tensor is about to run. True if that completes the last sample.
  bool decided(uint32_t slot, uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (samples_.size() >= samples_wanted_) return false;
    if (slot >= seen_.size()) seen_.resize(slot + 1);
    if (marker_ == kNone || (slot != marker_ && ++seen_[slot] >= kOften)) {
      marker_ = slot;
      std::fill(seen_.begin(), seen_.end(), 0);
      begin_sample();
    } else if (slot == marker_) {
      std::fill(seen_.begin(), seen_.end(), 0);
      ++steps_;
      add_busy_time();
      if (steps_ >= steps_wanted_ && busy_ns_ >= kLeastNs) {
        samples_.push_back({bytes_, busy_ns_, steps_});
        begin_sample();
      }
    }
    bytes_ += bytes;
    return samples_.size() == samples_wanted_;
  }

 private:
  static constexpr int64_t kLeastNs = 20'000'000;
  static constexpr int64_t kNone = -1;
  static constexpr uint8_t kOften = 8;

  // Adds the busy time until now to busy_ns_.
  void add_busy_time() {
    const int64_t now = steady_now_ns();
    if (pending_ > 0) busy_ns_ += now - busy_since_;
    busy_since_ = now;
  }
  void begin_sample() {
    add_busy_time();
    bytes_ = steps_ = 0;
    busy_ns_ = 0;
  }

  std::atomic<bool> is_on_{false};
  std::mutex mutex_;
  uint64_t steps_wanted_ = 0;
  size_t samples_wanted_ = 0;
  std::vector<Sample> samples_;
  int64_t marker_ = kNone;     // a slot
  std::vector<uint8_t> seen_;  // by slot: decisions since the marker
  uint64_t steps_ = 0, bytes_ = 0;
  int64_t busy_ns_ = 0, busy_since_ = 0;
  size_t pending_ = 0;  // submitted and not ended; start() keeps it
};

}  // namespace ronde
