// Waking a rank that sleeps: one bell per rank in shared memory, so that any rank of the host can ring it.
//
// The rule that makes it safe: a rank that wants to sleep first says so (`sleeper`), then looks once more at what it
// waits for, then sleeps. A rank that changes something first publishes the change, then looks whether the other
// sleeps. A full fence on both sides between the two steps means that at least one of them sees the other.
// Ringing a rank that is awake costs one load of its cache line and no system call.
#pragma once

#include <atomic>
#include <cstdint>

#include "descriptor.h"

namespace ronde {

enum class Sleep : uint32_t {
  kAwake = 0,
  kFutex = 1,  // waits for other ranks of this host only
  kPoll = 2,   // waits for sockets too: wake it through its eventfd
};

struct alignas(64) Bell {
  std::atomic<uint32_t> rings{0};  // the futex word: counts rings while asleep
  std::atomic<Sleep> sleeper{Sleep::kAwake};
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<Sleep>::is_always_lock_free);

// How this process reaches one rank's bell. Does not own the eventfd.
class BellRope {
 public:
  BellRope() = default;
  BellRope(Bell* bell, int eventfd) : bell_(bell), eventfd_(eventfd) {}

  // Wakes the rank if it sleeps. Call after publishing what it may be waiting for. Any thread.
  void ring() const {
    publish_before_ringing();
    ring_after_publishing();
  }

  // The two halves of ring(), for whoever rings several bells after one publication: a full fence, then the look.
  static void publish_before_ringing() { std::atomic_thread_fence(std::memory_order_seq_cst); }
  void ring_after_publishing() const {
    if (bell_->sleeper.load(std::memory_order_relaxed) != Sleep::kAwake) wake();
  }

  // For the bell's owner. prepare() announces the sleep and returns a token; after that look again at what you wait
  // for, then either cancel() or sleep. sleep_on_futex() returns at a ring, after timeout_ns (no limit if < 0), or,
  // then with true, when a signal cuts it short.
  uint32_t prepare(Sleep kind) const;
  void cancel() const;
  bool sleep_on_futex(uint32_t token, int64_t timeout_ns) const;
  int eventfd() const { return eventfd_; }

 private:
  void wake() const;

  Bell* bell_ = nullptr;
  int eventfd_ = -1;
};

// What the owner of a bell polls for while it waits for sockets, too. One eventfd is rung for all communicators of a
// process, by any of which a thread may sleep. So nobody reads it: each has an epoll that becomes readable at every
// ring (EPOLLET), and hears those for the others as well, after which it sleeps again.
class Doorbell {
 public:
  // -1: it does not ring.
  explicit Doorbell(int eventfd);

  int descriptor() const { return epoll_.get(); }
  // After a ring: readable again at the next one.
  void clear() const;
  // In a forked child.
  void abandon() { epoll_.reset(); }

 private:
  Descriptor epoll_;
};

}  // namespace ronde
