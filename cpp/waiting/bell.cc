#include "waiting/bell.h"

#include <linux/futex.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace ronde {

void BellHandle::wake() const {
  const Sleep sleeper = bell_->sleeper.load(std::memory_order_relaxed);
  bell_->rings.fetch_add(1, std::memory_order_release);
  if (sleeper == Sleep::kFutex) {
    // Not FUTEX_PRIVATE: the sleeper is another process.
    syscall(SYS_futex, &bell_->rings, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  } else if (sleeper == Sleep::kPoll && eventfd_ != nullptr && eventfd_->is_open()) {
    const uint64_t one = 1;
    // A full counter (EAGAIN) means that a wake-up is pending already.
    [[maybe_unused]] const ssize_t written = write(eventfd_->get(), &one, sizeof(one));
  }
}

uint32_t BellHandle::prepare(Sleep kind) const {
  const uint32_t token = bell_->rings.load(std::memory_order_acquire);
  bell_->sleeper.store(kind, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return token;
}

void BellHandle::cancel() const { bell_->sleeper.store(Sleep::kAwake, std::memory_order_relaxed); }

bool BellHandle::sleep_on_futex(uint32_t token, int64_t timeout_ns) const {
  const bool interrupted = await_ring(token, timeout_ns);
  cancel();
  return interrupted;
}

bool BellHandle::await_ring(uint32_t token, int64_t timeout_ns) const {
  timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  // Returns at once if the word has changed since prepare(). Any reason to return is fine: the caller checks again.
  const long result =
      syscall(SYS_futex, &bell_->rings, FUTEX_WAIT, token, timeout_ns < 0 ? nullptr : &timeout, nullptr, 0);
  return result < 0 && errno == EINTR;
}

Doorbell::Doorbell(int eventfd) {
  if (eventfd < 0) return;
  epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  epoll_event rings{};
  rings.events = EPOLLIN | EPOLLET;
  if (epoll_.get() < 0 || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, eventfd, &rings) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll");
  }
}

void Doorbell::clear() const {
  epoll_event ring{};
  epoll_wait(epoll_.get(), &ring, 1, 0);
}

}  // namespace ronde
