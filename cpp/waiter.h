// The wait of a rank inside a collective: it spins briefly, yields its core, then sleeps. Every wait ends when the
// communicator fails or the time limit is over.
//
// The waiter calls `step` until it returns true. `step` makes progress on links and checks the condition; it must not
// block. The rank that makes the condition true rings this rank's bell, or makes a socket ready.
#pragma once

#include <poll.h>

#include <cstdint>
#include <vector>

#include "bell.h"
#include "failure_state.h"
#include "function_ref.h"

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
    for (int spin = 0; spin < policy_.spins; ++spin) {
      if (step()) return;
      pause();
    }
    sleep_until(step);
  }

  // Waits for sockets, too. Before each sleep it calls `add_poll(fds)`, which appends the descriptors to poll.
  template <class Step, class AddPoll>
  void until(Step&& step, AddPoll&& add_poll) {
    // A step with sockets makes system calls, so fewer steps take the same time.
    for (int spin = 0; spin < policy_.spins / 64; ++spin) {
      if (step()) return;
    }
    poll_until(step, add_poll);
  }

  FailureState& failure() { return failure_; }

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
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // The state of one wait from its first sleep on.
  struct Patience {
    int64_t started_ns;
    bool is_long = false;
  };
  int64_t sleep_limit_ns(const Patience& patience) const;
  void check(Patience& patience, bool interrupted);
  void sleep_until(FunctionRef<bool()> step);
  void poll_until(FunctionRef<bool()> step, FunctionRef<void(std::vector<pollfd>&)> add_poll);

  BellHandle own_;
  Doorbell doorbell_;
  FailureState& failure_;
  WaitPolicy policy_;
  Listener* listener_ = nullptr;
  std::vector<pollfd> fds_;

  static inline bool (*interrupt_check_)() = nullptr;
};

}  // namespace ronde
