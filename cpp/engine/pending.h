// This rank's pending misses by name (hits are in the cycle's slots), and a wake-up at the next submission. For the
// detection of stalls.
//
// The hot path pays one load per submission. A submission wakes the stall detector only if it is armed, that is, if it
// sleeps without a time limit because nothing is pending.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"
#include "waiting/completion.h"

namespace ronde {

class Pending {
 public:
  using Visit = std::function<void(const std::string& name, Kind kind, const Completion& completion)>;

  // A miss is pending while it goes through the next negotiation rounds.
  void add_miss(std::string name, Kind kind, std::shared_ptr<Completion> completion) {
    {
      std::lock_guard lock(mutex_);
      if (misses_.size() >= limit_) {
        std::erase_if(misses_, [](const Miss& miss) { return !miss.completion->is_pending(); });
        limit_ = std::max(kLimit, 2 * misses_.size());
      }
      misses_.push_back({std::move(name), kind, std::move(completion)});
    }
    note_submission();
  }
  void visit_misses(const Visit& visit) {
    std::lock_guard lock(mutex_);
    std::erase_if(misses_, [](const Miss& miss) { return !miss.completion->is_pending(); });
    for (const Miss& miss : misses_) visit(miss.name, miss.kind, *miss.completion);
  }

  // Call it after a submission.
  void note_submission() {
    if (is_armed_.load(std::memory_order_relaxed)) [[unlikely]] {
      wake();
    }
  }

  // Call arm(), then check whether anything is pending: every submission after the check wakes the sleeper.
  void arm() { is_armed_.store(true, std::memory_order_seq_cst); }
  void disarm() { is_armed_.store(false, std::memory_order_seq_cst); }
  // Sets the function by which note_submission() wakes the sleeper. Call it before arm().
  void on_wake(std::function<void()> call) { call_ = std::move(call); }

 private:
  static constexpr size_t kLimit = 64;
  struct Miss {
    std::string name;
    Kind kind;
    std::shared_ptr<Completion> completion;
  };
  void wake() {
    if (is_armed_.exchange(false, std::memory_order_seq_cst)) call_();
  }

  std::mutex mutex_;
  std::vector<Miss> misses_;  // includes some that are finished
  size_t limit_ = kLimit;
  std::atomic<bool> is_armed_{false};
  std::function<void()> call_;
};

}  // namespace ronde
