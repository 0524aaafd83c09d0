#include "waiter.h"

#include <sched.h>

#include <cerrno>
#include <chrono>
#include <string>

namespace ronde {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

// After every sleep: has somebody ended the wait?
void Waiter::check(int64_t started_ns, bool interrupted) {
  if (interrupted && interrupt_check_ != nullptr && interrupt_check_()) throw Interrupted("interrupted by a signal");
  if (policy_.timeout_ns > 0 && now_ns() - started_ns >= policy_.timeout_ns) {
    failure_.set(FailureKind::kTimeout, -1,
                 "waited " + std::to_string(policy_.timeout_ns / 1'000'000) + " ms" + (explain_ ? explain_() : ""));
  }
  failure_.check();
}

void Waiter::sleep_until(FunctionRef<bool()> step) {
  for (int yield = 0; yield < policy_.yields; ++yield) {
    if (step()) return;
    failure_.check();
    sched_yield();
  }
  const int64_t started_ns = policy_.timeout_ns > 0 ? now_ns() : 0;
  while (true) {
    const uint32_t token = own_.prepare(Sleep::kFutex);
    if (step()) return own_.cancel();
    bool interrupted = false;
    if (failure_.failed()) {
      own_.cancel();
    } else {
      interrupted = own_.sleep_on_futex(token, policy_.timeout_ns > 0 ? policy_.timeout_ns : -1);
    }
    check(started_ns, interrupted);
  }
}

void Waiter::poll_until(FunctionRef<bool()> step, FunctionRef<void(std::vector<pollfd>&)> add_poll) {
  const int64_t started_ns = policy_.timeout_ns > 0 ? now_ns() : 0;
  const int timeout_ms = policy_.timeout_ns > 0 ? static_cast<int>(policy_.timeout_ns / 1'000'000 + 1) : -1;
  while (true) {
    own_.prepare(Sleep::kPoll);
    if (step()) return own_.cancel();
    bool interrupted = false;
    if (!failure_.failed()) {
      fds_.clear();
      fds_.push_back({own_.eventfd(), POLLIN, 0});
      add_poll(fds_);
      interrupted = poll(fds_.data(), fds_.size(), timeout_ms) < 0 && errno == EINTR;
      if (fds_[0].revents & POLLIN) own_.drain_eventfd();
    }
    own_.cancel();
    check(started_ns, interrupted);
  }
}

}  // namespace ronde
