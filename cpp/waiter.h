// How a rank waits inside a collective: look, spin briefly, give the core away, sleep; and always end when the
// communicator fails or the time limit is over.
//
// `step` is called again and again until it returns true; it moves what can be moved (progress of links) and looks at
// what it waits for. It must not block. Whoever makes it true rings this rank's bell, or makes a socket ready.
#pragma once

#include <poll.h>

#include <cstdint>
#include <vector>

#include "bell.h"
#include "failure_state.h"
#include "function_ref.h"

namespace ronde {

struct WaitPolicy {
  int spins = 64;          // first this many looks with a CPU pause between them: 2 or 3 us
  int yields = 256;        // then this many looks with sched_yield() between them
  int64_t timeout_ns = 0;  // after so long the communicator fails with kTimeout; 0: wait for ever
};

class Waiter {
 public:
  Waiter(BellRope own, FailureState& failure, WaitPolicy policy)
      : own_(own), doorbell_(own.eventfd()), failure_(failure), policy_(policy) {}

  // Waits for other ranks of this host. Throws Failure.
  template <class Step>
  void until(Step&& step) {
    for (int spin = 0; spin < policy_.spins; ++spin) {
      if (step()) return;
      pause();
    }
    sleep_until(step);
  }

  // Waits for sockets too; `add_poll(fds)` appends those to poll and is called before each sleep.
  template <class Step, class AddPoll>
  void until(Step&& step, AddPoll&& add_poll) {
    // A look at a socket is a system call, so fewer of them make the same time.
    for (int spin = 0; spin < policy_.spins / 64; ++spin) {
      if (step()) return;
    }
    poll_until(step, add_poll);
  }

  FailureState& failure() { return failure_; }

  // What a communicator wants to hear of its waits. Called by the waiting thread.
  class Listener {
   public:
    virtual ~Listener() = default;
    // A wait that began at `since_ns` has lasted a second, and perhaps will for ever: once per wait.
    virtual void wait_is_long(int64_t since_ns) = 0;
    // The time limit is over: throws the Failure that it is.
    virtual void wait_is_over() = 0;
  };
  void set_listener(Listener* listener) { listener_ = listener; }

  // In a forked child.
  void abandon() { doorbell_.abandon(); }

  // Called when a signal cuts a sleep short; true ends the wait with Interrupted. Set once, before any waiting.
  static void set_interrupt_check(bool (*check)()) { interrupt_check_ = check; }

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // One wait, from its first sleep on.
  struct Patience {
    int64_t started_ns;
    bool is_long = false;
  };
  int64_t sleep_limit_ns(const Patience& patience) const;
  void check(Patience& patience, bool interrupted);
  void sleep_until(FunctionRef<bool()> step);
  void poll_until(FunctionRef<bool()> step, FunctionRef<void(std::vector<pollfd>&)> add_poll);

  BellRope own_;
  Doorbell doorbell_;
  FailureState& failure_;
  WaitPolicy policy_;
  Listener* listener_ = nullptr;
  std::vector<pollfd> fds_;

  static inline bool (*interrupt_check_)() = nullptr;
};

}  // namespace ronde
