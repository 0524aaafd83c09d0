// The wait of a rank inside a collective: it spins briefly, yields its core, then sleeps. Every wait ends when the
// communicator fails or the time limit is over.
//
// The waiter calls `step` until it returns true. `step` makes progress on links and checks the condition; it must not
// block. The rank that makes the condition true rings this rank's bell, or makes a socket ready.
#pragma once

#include <poll.h>

#include <cstdint>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "failures/failure_state.h"
#include "waiting/bell.h"
#include "waiting/call_terms.h"

namespace ronde {

struct WaitPolicy {
  int spins = 64;          // first, steps with a CPU pause between them: 2 or 3 us
  int yields = 256;        // then, steps with sched_yield() between them
  int64_t timeout_ns = 0;  // then the communicator fails with kTimeout; 0: no limit
};

class Waiter {
 public:
  Waiter(BellHandle own, FailureState& failure, WaitPolicy policy)
      : own_(own), doorbell_(own.eventfd()), failure_(failure), policy_(policy) {}

  // Waits for other ranks of this host. Throws Failure.
  template <class Step>
  void until(Step&& step) {
    if (!spin(step)) sleep_until(step);
  }

  // The beginning of a wait. Returns whether the step has returned true.
  template <class Step>
  bool spin(Step&& step) {
    for (int spin = 0; spin < policy_.spins; ++spin) {
      if (step()) return true;
      pause();
    }
    return false;
  }

  // The descriptors of a wait.
  class Sockets {
   public:
    virtual ~Sockets() = default;
    virtual void add_poll(std::vector<pollfd>& fds) const = 0;         // appends those to poll
    virtual void take_poll(std::span<const pollfd> fds) noexcept = 0;  // the same, with what poll(2) has found out
  };
  // Waits for sockets, too.
  template <class Step>
  void until(Step&& step, Sockets& sockets) {
    // Looking at sockets takes a system call, so fewer looks take the same time. The wait in poll(2) begins with one.
    for (int looks = policy_.spins / 64;; --looks) {
      if (step()) return;
      if (looks <= 1) break;
      poll_sockets(sockets, 0);
    }
    poll_until(step, sockets);
  }

  FailureState& failure() { return failure_; }
  const BellHandle& own() const { return own_; }
  const WaitPolicy& policy() const { return policy_; }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // Of the call that begins now.
  void set_terms(const CallTerms& terms) { terms_ = terms; }
  const CallTerms& terms() const { return terms_; }
  // The limit that holds now; 0: none.
  int64_t timeout_ns() const { return terms_.timeout_ns > 0 ? terms_.timeout_ns : policy_.timeout_ns; }

  // Notifies a communicator of its waits. The waiting thread calls it.
  class Listener {
   public:
    virtual ~Listener() = default;
    // A wait that began at `since_ns` has lasted a second. At most once per wait.
    virtual void on_long_wait(int64_t since_ns) = 0;
    // The time limit is over. Throws the Failure.
    virtual void on_timeout() = 0;
  };
  void set_listener(Listener* listener) { listener_ = listener; }

  // For a forked child.
  void abandon() { doorbell_.abandon(); }

  // Sets the function to call when a signal interrupts a sleep; if it returns true, the wait ends with Interrupted. Set
  // it once, before any wait.
  static void set_interrupt_check(bool (*check)()) { interrupt_check_ = check; }

 private:
  // The state of one wait from its first sleep on.
  struct Patience {
    int64_t started_ns;
    bool is_long = false;
  };
  int64_t end_ns(const Patience& patience) const;
  int64_t sleep_limit_ns(const Patience& patience) const;
  void check(Patience& patience, bool interrupted);
  void sleep_until(FunctionRef<bool()> step);
  void poll_until(FunctionRef<bool()> step, Sockets& sockets);
  bool poll_sockets(Sockets& sockets, int timeout_ms);

  BellHandle own_;
  Doorbell doorbell_;
  FailureState& failure_;
  WaitPolicy policy_;
  CallTerms terms_;
  Listener* listener_ = nullptr;
  std::vector<pollfd> fds_;

  static inline bool (*interrupt_check_)() = nullptr;
};

}  // namespace ronde
