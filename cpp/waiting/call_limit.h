// A time limit for the calls of one thread, instead of the communicator's own limit.
#pragma once

#include <cstdint>
#include <utility>

#include "base/steady_clock.h"

namespace ronde {

// While it exists, every wait in this thread's calls, on any communicator, ends `timeout_ns` after its construction.
// 0: the communicator's limit, which holds for each wait.
class CallLimit {
 public:
  struct Limit {
    int64_t timeout_ns;  // 0: none
    int64_t ends_ns;     // steady clock; only if timeout_ns > 0
  };

  explicit CallLimit(int64_t timeout_ns) : before_(current_) {
    current_ = timeout_ns > 0 ? Limit{timeout_ns, steady_now_ns() + timeout_ns} : Limit{};
  }
  ~CallLimit() { current_ = before_; }
  CallLimit(const CallLimit&) = delete;
  CallLimit& operator=(const CallLimit&) = delete;

  // Of this thread.
  static const Limit& current() { return current_; }

 private:
  Limit before_;
  static inline thread_local constinit Limit current_{};
};

}  // namespace ronde
