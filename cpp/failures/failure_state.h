// The failure of a communicator: the first reported one, for ever.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>

#include "base/error.h"

namespace ronde {

class FailureState {
 public:
  // Returns true if this is the first failure. Any thread.
  bool set(const Failure& failure) {
    std::lock_guard lock(mutex_);
    if (failure_) return false;
    failure_ = failure;
    failed_.store(true, std::memory_order_release);
    return true;
  }

  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // Throws the failure if there is one; costs one load if there is none.
  void check() const {
    if (failed()) [[unlikely]] {
      throw failure();
    }
  }

  // Call it only after failed() has returned true.
  Failure failure() const {
    std::lock_guard lock(mutex_);
    return *failure_;
  }

 private:
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::optional<Failure> failure_;
};

}  // namespace ronde
