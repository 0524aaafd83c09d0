// The one failure of a communicator: the first one reported wins and stays.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "error.h"

namespace ronde {

class FailureState {
 public:
  // True if this was the first failure. Any thread.
  bool set(FailureKind kind, int rank, std::string reason) {
    std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return false;
    kind_ = kind;
    rank_ = rank;
    reason_ = std::move(reason);
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

  // Only after failed().
  Failure failure() const {
    std::lock_guard lock(mutex_);
    return Failure(kind_, rank_, reason_);
  }

 private:
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  FailureKind kind_ = FailureKind::kNone;
  int rank_ = -1;
  std::string reason_;
};

}  // namespace ronde
