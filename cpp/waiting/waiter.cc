#include "waiting/waiter.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>

#include "base/steady_clock.h"

namespace ronde {
namespace {

constexpr int64_t kLongWaitNs = 1'000'000'000;
// A shorter yield has given the core to no thread: Linux yields within a session only (autogroup), and there is none to
// run. After a few of these the wait sleeps, because a peer of another session may need this core.
constexpr int64_t kVainYieldNs = 2'000;
constexpr int kMostVainYields = 16;

}  // namespace

// When the time limit is over; INT64_MAX: never.
int64_t Waiter::end_ns(const Patience& patience) const {
  if (terms_.timeout_ns > 0) return terms_.ends_ns;
  return policy_.timeout_ns > 0 ? patience.started_ns + policy_.timeout_ns : INT64_MAX;
}

// The limit of the next sleep; -1: none.
int64_t Waiter::sleep_limit_ns(const Patience& patience) const {
  int64_t until_ns = end_ns(patience);
  if (!patience.is_long) until_ns = std::min(until_ns, patience.started_ns + kLongWaitNs);
  return until_ns == INT64_MAX ? -1 : std::max<int64_t>(until_ns - steady_now_ns(), 0);
}

// Called after every sleep: ends the wait on a signal or at the time limit, and reports a long wait.
void Waiter::check(Patience& patience, bool interrupted) {
  const int64_t now_ns = steady_now_ns();
  const bool becomes_long = !patience.is_long && now_ns - patience.started_ns >= kLongWaitNs;
  // A signal just before a sleep interrupts nothing, so check for it when the wait becomes long.
  if ((interrupted || becomes_long) && interrupt_check_ != nullptr && interrupt_check_()) {
    throw Interrupted("interrupted by a signal");
  }
  if (becomes_long) {
    patience.is_long = true;
    if (listener_ != nullptr) listener_->on_long_wait(patience.started_ns);
  }
  failure_.check();
  if (now_ns >= end_ns(patience)) {
    if (listener_ != nullptr) listener_->on_timeout();
    throw Failure(FailureKind::kTimeout, -1, "waited too long");
  }
}

void Waiter::sleep_until(FunctionRef<bool()> step) {
  int64_t before_ns = steady_now_ns();
  for (int yield = 0, vain = 0; yield < policy_.yields && vain < kMostVainYields; ++yield) {
    if (step()) return;
    failure_.check();
    sched_yield();
    const int64_t now_ns = steady_now_ns();
    if (now_ns - before_ns < kVainYieldNs) ++vain;
    before_ns = now_ns;
  }
  Patience patience{steady_now_ns()};
  while (true) {
    const uint32_t token = own_.prepare(Sleep::kFutex);
    if (step()) return own_.cancel();
    bool interrupted = false;
    if (failure_.failed()) {
      own_.cancel();
    } else {
      interrupted = own_.sleep_on_futex(token, sleep_limit_ns(patience));
    }
    check(patience, interrupted);
  }
}

void Waiter::poll_until(FunctionRef<bool()> step, Sockets& sockets) {
  Patience patience{steady_now_ns()};
  while (true) {
    own_.prepare(Sleep::kPoll);
    if (step()) return own_.cancel();
    bool interrupted = false;
    if (!failure_.failed()) {
      const int64_t limit_ns = sleep_limit_ns(patience);
      // Rounds up to whole milliseconds, so that the sleep never ends before the limit.
      const int timeout_ms = limit_ns < 0 ? -1 : static_cast<int>((limit_ns + 999'999) / 1'000'000);
      interrupted = poll_sockets(sockets, timeout_ms);
    }
    own_.cancel();
    check(patience, interrupted);
  }
}

// Returns whether a signal has interrupted it.
bool Waiter::poll_sockets(Sockets& sockets, int timeout_ms) {
  fds_.clear();
  fds_.push_back({doorbell_.descriptor(), POLLIN, 0});
  sockets.add_poll(fds_);
  const int ready = poll(fds_.data(), fds_.size(), timeout_ms);
  if (ready < 0) {
    if (errno == EINTR) return true;
    own_.cancel();
    throw std::system_error(errno, std::generic_category(), "poll");
  }
  if (fds_[0].revents & POLLIN) doorbell_.clear();
  sockets.take_poll(std::span(fds_).subspan(1));
  return false;
}

}  // namespace ronde
