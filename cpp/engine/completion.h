// Whether one submitted tensor is through: pending, then done or failed, once.
#pragma once

#include <atomic>
#include <cstdint>

#include "futex.h"

namespace ronde {

class Completion {
 public:
  bool is_pending() const { return state_.load(std::memory_order_acquire) == kPending; }
  bool has_failed() const { return state_.load(std::memory_order_acquire) == kFailed; }

  void finish(bool ok) {
    state_.store(ok ? kDone : kFailed, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake_all(state_);
  }

  // Sleeps until it is finished; false if a signal came first, or after a second: a signal that came just before the
  // sleep has interrupted nothing, and the caller should look for it.
  bool sleep() {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (state_.load(std::memory_order_seq_cst) == kPending && futex_sleep(state_, kPending)) {
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return !is_pending();
  }

 private:
  static constexpr uint32_t kPending = 0, kDone = 1, kFailed = 2;
  std::atomic<uint32_t> state_{kPending};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace ronde
