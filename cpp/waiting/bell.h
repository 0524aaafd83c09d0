// Bells wake sleeping ranks: each rank has one in shared memory, and any rank of the host can ring it.
//
// The rule that makes it safe: before a rank sleeps, it sets `sleeper`, then checks its condition once more, then
// sleeps. A rank that changes something first publishes the change, then checks whether the other sleeps. A full fence
// between the two steps on both sides ensures that at least one of them sees the other. Ringing a rank that is awake
// costs one load of its cache line and no system call.
#pragma once

#include <atomic>
#include <cstdint>

#include "system/descriptor.h"

namespace ronde {

enum class Sleep : uint32_t {
  kAwake = 0,
  kFutex = 1,  // waits for other ranks of this host only
  kPoll = 2,   // waits for sockets too; its eventfd wakes it
};

struct alignas(64) Bell {
  std::atomic<uint32_t> rings{0};  // the futex word: counts rings while asleep
  std::atomic<Sleep> sleeper{Sleep::kAwake};
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<Sleep>::is_always_lock_free);

// This process's handle of one rank's bell. The eventfd, which wakes a rank out of poll(2), must outlive it; null: the
// rank never polls. If the program has closed the eventfd, a ring does not write into another file with its number.
class BellHandle {
 public:
  BellHandle() = default;
  explicit BellHandle(Bell* bell, const Descriptor* eventfd = nullptr) : bell_(bell), eventfd_(eventfd) {}

  // Wakes the rank if it sleeps. Call it after publishing the change that the rank may wait for. Any thread.
  void ring() const {
    publish_before_ringing();
    ring_after_publishing();
  }

  // The two halves of ring(), for a caller that rings several bells after one publication: a full fence, then the check
  // for a sleeper.
  static void publish_before_ringing() { std::atomic_thread_fence(std::memory_order_seq_cst); }
  void ring_after_publishing() const {
    if (bell_->sleeper.load(std::memory_order_relaxed) != Sleep::kAwake) wake();
  }

  // For the bell's owner. prepare() announces the sleep and returns a token. Afterwards check the condition again, then
  // either cancel() or sleep. sleep_on_futex() returns at a ring, after timeout_ns (no limit if < 0), or at a signal;
  // it returns true only at a signal. await_ring() is the same without the cancel() at its end.
  uint32_t prepare(Sleep kind) const;
  void cancel() const;
  bool sleep_on_futex(uint32_t token, int64_t timeout_ns) const;
  bool await_ring(uint32_t token, int64_t timeout_ns) const;
  int eventfd() const { return eventfd_ == nullptr ? -1 : eventfd_->get(); }

 private:
  void wake() const;

  Bell* bell_ = nullptr;
  const Descriptor* eventfd_ = nullptr;
};

// The descriptor that a bell's owner polls while it also waits for sockets. All communicators of a process share one
// eventfd, and a thread may sleep in each of them. So no thread reads the eventfd: each communicator has an epoll that
// becomes readable at every ring (EPOLLET). A ring for another communicator wakes it, too, after which it sleeps again.
class Doorbell {
 public:
  // -1: no ring ever comes.
  explicit Doorbell(int eventfd);

  int descriptor() const { return epoll_.get(); }
  // Call it after a ring. The descriptor becomes readable again at the next one.
  void clear() const;
  // For a forked child.
  void abandon() { epoll_.reset(); }

 private:
  Descriptor epoll_;
};

}  // namespace ronde
