// What one thread sets for its calls of communicators: a time limit instead of the communicator's own, and the place in
// the program that has asked for them.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "base/steady_clock.h"

namespace ronde {

struct CallTerms {
  int64_t timeout_ns = 0;                  // 0: the communicator's limit, which holds for each wait
  int64_t ends_ns = 0;                     // of the waits, if timeout_ns > 0; steady clock
  const std::string* posted_at = nullptr;  // "train.py:12", if another thread has posted the calls; null: unknown
};

// While it exists, every wait in this thread's calls ends `timeout_ns` after its construction.
class WithCallTerms {
 public:
  explicit WithCallTerms(int64_t timeout_ns, const std::string* posted_at = nullptr) : before_(current_) {
    const int64_t now_ns = steady_now_ns();
    const bool is_far = timeout_ns > std::numeric_limits<int64_t>::max() - now_ns;
    current_ = {is_far ? 0 : timeout_ns, timeout_ns > 0 && !is_far ? now_ns + timeout_ns : 0, posted_at};
  }
  ~WithCallTerms() { current_ = before_; }
  WithCallTerms(const WithCallTerms&) = delete;
  WithCallTerms& operator=(const WithCallTerms&) = delete;

  // Of this thread.
  static const CallTerms& current() { return current_; }

 private:
  CallTerms before_;
  static inline thread_local constinit CallTerms current_{};
};

}  // namespace ronde
