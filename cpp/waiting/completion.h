// The state of one operation that the program waits for, such as a submitted tensor: pending, then done or failed,
// exactly once; and the time of its submission.
#pragma once

#include <atomic>
#include <cstdint>

#include "system/futex.h"
#include "waiting/bell.h"

namespace ronde {

// The steady clock at the last tick, which is a few milliseconds ago. Costs a few loads.
inline int64_t coarse_now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

class Completion {
 public:
  bool is_pending() const { return state_.load(std::memory_order_acquire) == kPending; }
  bool has_failed() const { return state_.load(std::memory_order_acquire) == kFailed; }
  int64_t since_ns() const { return since_ns_; }  // by the coarse clock

  // Marks the tensor as running, which it does once all ranks have submitted it. Returns how long it has waited.
  int64_t begin_running(int64_t now_ns) {
    is_running_.store(true, std::memory_order_relaxed);
    return now_ns - since_ns_;
  }
  bool is_running() const { return is_running_.load(std::memory_order_relaxed); }
  // Whether a thread sleeps until the tensor is finished.
  bool is_awaited() const {
    return sleepers_.load(std::memory_order_relaxed) > 0 || bell_.load(std::memory_order_relaxed) != nullptr;
  }

  void finish(bool ok) {
    state_.store(ok ? kDone : kFailed, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake_all(state_);
    if (const BellHandle* bell = bell_.load(std::memory_order_seq_cst)) bell->ring();
  }

  // For a thread that sleeps on a bell: finish() rings it, which must outlive the completion. Null: no thread does.
  void ring_at_finish(const BellHandle* bell) { bell_.store(bell, std::memory_order_seq_cst); }

  // Sleeps until the tensor is finished. Returns false if a signal comes first, or after `limit_ns`, at most a second:
  // a signal just before the sleep interrupts nothing, so the caller must check for signals.
  static constexpr int64_t kLongestSleepNs = 1'000'000'000;
  bool sleep(int64_t limit_ns = kLongestSleepNs) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (state_.load(std::memory_order_seq_cst) == kPending && futex_sleep(state_, kPending, limit_ns)) {
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return !is_pending();
  }

 private:
  static constexpr uint32_t kPending = 0, kDone = 1, kFailed = 2;
  std::atomic<uint32_t> state_{kPending};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<const BellHandle*> bell_{nullptr};
  std::atomic<bool> is_running_{false};
  const int64_t since_ns_ = coarse_now_ns();
};

}  // namespace ronde
