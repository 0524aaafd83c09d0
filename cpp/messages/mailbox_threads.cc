// Which thread drives the links of a mailbox, and how the others wait.
#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <mutex>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "base/steady_clock.h"
#include "messages/mailbox.h"
#include "waiting/waiter.h"

namespace ronde {
namespace {

// A waiting thread checks for signals this often: while it moves bytes, and while it sleeps.
constexpr int64_t kLookNs = 50'000'000;
constexpr int64_t kCheckNs = 1'000'000'000;
// For how long a waiting thread looks without news. A yield may give the core to no thread, or to another program.
constexpr int64_t kLookWithoutNewsNs = 10'000;
// For how long the mailbox's thread stays parked before it looks whether waiting threads still drive: longer if one
// sleeps now, or has driven since.
constexpr auto kShortestPark = std::chrono::milliseconds(1);
constexpr auto kParkBetweenWaits = std::chrono::milliseconds(4);
constexpr auto kLongestPark = std::chrono::milliseconds(64);
constexpr int64_t kLongSleepNs = 1'000'000;

}  // namespace

// Whether messages are under way on the links, so that a driver should look again soon.
bool Mailbox::is_busy() const {
  return std::ranges::any_of(peers_, [](const Peer& peer) {
    return !peer.has_left && (!peer.outgoing.empty() || peer.incoming.size() > 1 || !peer.accepted.empty());
  });
}

// How often a thread looks without news before it sleeps. Looking at sockets takes a system call.
int Mailbox::most_looks() const {
  const WaitPolicy& policy = links_.policy;
  return links_.has_sockets ? std::max(policy.spins / 64, 1) : policy.spins + policy.yields;
}

// With `lock`, releases it while it waits. Returns true if a signal has interrupted it.
bool Mailbox::look_at_sockets(const Doorbell& doorbell, int timeout_ms, std::unique_lock<std::mutex>* lock) {
  std::vector<pollfd> fds;
  fds.push_back({doorbell.descriptor(), POLLIN, 0});
  for (const Peer& peer : peers_) {
    if (peer.link != nullptr && !peer.has_left) peer.link->add_poll(fds);
  }
  if (lock != nullptr) lock->unlock();
  const int ready = poll(fds.data(), fds.size(), timeout_ms);
  const int error = errno;
  if (lock != nullptr) lock->lock();
  if (failure_) return false;  // the links may be gone
  if (ready < 0) {
    if (error == EINTR) return true;
    throw std::system_error(error, std::generic_category(), "poll");
  }
  if (fds[0].revents & POLLIN) doorbell.clear();
  std::span<const pollfd> found = std::span(fds).subspan(1);
  for (const Peer& peer : peers_) {
    if (peer.link != nullptr) found = found.subspan(peer.link->take_poll(found));
  }
  return false;
}

// The mailbox's thread.
void Mailbox::run() {
  std::unique_lock lock(mutex_);
  int looks = 0;
  while (!is_closed_) {
    if (driving_ > 0) {
      looks = 0;
      park(lock);
      continue;
    }
    const bool moved = step(links_.has_sockets && looks > 0);
    if (moved) looks = 1;
    if (moved || (looks > 0 && ++looks < most_looks() && is_busy())) {
      lock.unlock();
      looks < links_.policy.spins ? Waiter::pause() : static_cast<void>(sched_yield());
      lock.lock();
      continue;
    }
    looks = 0;
    sleep_on_bell(lock, Sleeper::kThread, INT64_MAX);
  }
}

// Leaves the links to the waiting threads. It looks now and then whether they still drive them, because a waiting
// thread that ends soon wakes it only if messages are pending: a program that waits often would otherwise wake it every
// time. For the same reason it stays parked between such waits if there are no messages to move.
void Mailbox::park(std::unique_lock<std::mutex>& lock) {
  is_parked_ = true;
  auto patience = kShortestPark;
  bool leaves_links = true;
  while (leaves_links && !is_closed_) {
    has_driven_ = false;
    unparked_.wait_for(lock, patience);
    const auto longest = sleeper_ == Sleeper::kWaiting ? kLongestPark : kParkBetweenWaits;
    patience = std::min(2 * patience, longest);
    leaves_links = driving_ > 0 || (has_driven_ && pending_ == 0);
  }
  is_parked_ = false;
}

// Sleeps until there may be something to do, or until the time. Returns true if a signal has interrupted it.
bool Mailbox::sleep_on_bell(std::unique_lock<std::mutex>& lock, Sleeper sleeper, int64_t until_ns) {
  const uint32_t token = links_.bell.prepare(links_.has_sockets ? Sleep::kPoll : Sleep::kFutex);
  const bool moved = step(false);
  if (moved || failure_) {
    links_.bell.cancel();
    // Of a failed mailbox the thread sleeps until it is closed.
    if (sleeper == Sleeper::kThread && failure_ && !is_closed_) unparked_.wait(lock);
    return false;
  }
  sleeper_ = sleeper;
  if (looking_ > 0) links_.bell.cancel();  // stop_driving() announces the sleep
  const int64_t left_ns = until_ns == INT64_MAX ? -1 : std::max<int64_t>(until_ns - steady_now_ns(), 0);
  bool interrupted = false;
  if (links_.has_sockets) {
    const Doorbell& doorbell = sleeper == Sleeper::kThread ? thread_doorbell_ : waiting_doorbell_;
    try {
      const int timeout_ms = left_ns < 0 ? -1 : static_cast<int>((left_ns + 999'999) / 1'000'000);
      interrupted = look_at_sockets(doorbell, timeout_ms, &lock);
    } catch (...) {
      fail_all(communicator_.fail_links(std::current_exception()));
    }
  } else {
    lock.unlock();
    interrupted = links_.bell.await_ring(token, left_ns);
    lock.lock();
  }
  if (sleeper_ == sleeper) {  // a waiting thread takes the place of the mailbox's
    sleeper_ = Sleeper::kNobody;
    if (!is_closed_) links_.bell.cancel();
  }
  return interrupted;
}

void Mailbox::wait(Message& message, int64_t until_ns) {
  const int64_t soon_ns = std::min(until_ns, steady_now_ns() + kCheckNs);
  for (bool may_drive = !is_abandoned(); may_drive && message.is_pending();) {
    switch (drive(message, soon_ns)) {
      case Drive::kInterrupted:
        return;
      case Drive::kAnotherDrives: {
        const int64_t left_ns = soon_ns - steady_now_ns();
        if (left_ns > 0 && message.sleep(left_ns)) break;
        return;
      }
      case Drive::kSlept:
        may_drive = steady_now_ns() < soon_ns;
    }
  }
}

// Drives the links until a message has ended. It stays the driver after a ring that was about something else, such as
// room in a link: the mailbox's thread would be woken for nothing that it can do.
Mailbox::Drive Mailbox::drive(Message& message, int64_t until_ns) {
  std::unique_lock lock(mutex_);
  if (failure_) return Drive::kSlept;
  ++driving_;
  has_driven_ = true;
  bool has_slept_long = false;
  Drive result;
  int looks = most_looks();
  do {
    result = look_and_sleep(lock, message, until_ns, looks, has_slept_long);
    looks = 1;  // until something moves
  } while (result == Drive::kSlept && !failure_ && message.is_pending() && steady_now_ns() < until_ns);
  --driving_;
  if (!failure_) stop_driving(has_slept_long);
  return result;
}

Mailbox::Drive Mailbox::look_and_sleep(std::unique_lock<std::mutex>& lock, Message& message, int64_t until_ns,
                                       int looks, bool& has_slept_long) {
  if (looking_++ == 0 && sleeper_ != Sleeper::kNobody) links_.bell.cancel();
  const bool is_over = look(lock, message, until_ns, looks);
  --looking_;
  if (is_over) return Drive::kInterrupted;
  if (failure_ || !message.is_pending()) return Drive::kSlept;
  if (sleeper_ == Sleeper::kWaiting) return Drive::kAnotherDrives;
  if (sleeper_ == Sleeper::kThread) wake_sleeper();  // it parks
  awaited_ = &message;
  const int64_t since_ns = steady_now_ns();
  const bool interrupted = sleep_on_bell(lock, Sleeper::kWaiting, until_ns);
  has_slept_long |= steady_now_ns() - since_ns > kLongSleepNs;
  if (awaited_ == &message) awaited_ = nullptr;
  step(false);
  return interrupted ? Drive::kInterrupted : Drive::kSlept;
}

// Looks until the message has ended, or there was no news for a while: `most` times, or longer once something has
// moved. Returns true at `end_ns`.
bool Mailbox::look(std::unique_lock<std::mutex>& lock, const Message& message, int64_t end_ns, int most) {
  int64_t now_ns = steady_now_ns(), moved_ns = now_ns;
  end_ns = std::min(end_ns, now_ns + kLookNs);
  for (int looks = 0; !failure_ && looks < most && now_ns - moved_ns < kLookWithoutNewsNs; ++looks) {
    const bool moved = step(looks > 0);
    if (!message.is_pending()) return false;
    lock.unlock();
    looks < links_.policy.spins ? Waiter::pause() : static_cast<void>(sched_yield());
    now_ns = steady_now_ns();
    lock.lock();
    if (now_ns >= end_ns) return true;
    if (!moved) continue;
    looks = 0;
    most = most_looks();
    moved_ns = now_ns;
  }
  return false;
}

// Another thread may have to drive from here on.
void Mailbox::stop_driving(bool has_slept_long) {
  if (looking_ > 0) return;
  if (sleeper_ != Sleeper::kNobody) {
    links_.bell.prepare(links_.has_sockets ? Sleep::kPoll : Sleep::kFutex);
    // What peers published before they could see the announcement. If there is more to come, the sleeper takes it.
    if (step(false)) wake_sleeper();
    wake_for_sockets();
  } else if (is_parked_ && driving_ == 0 && (pending_ > 0 || has_slept_long)) {
    unparked_.notify_one();
  }
}

// The descriptors for which the sleeper waits may have changed.
void Mailbox::wake_for_sockets() {
  if (failure_ || !links_.has_sockets || looking_ > 0 || !is_busy()) return;
  if (sleeper_ != Sleeper::kNobody) {
    wake_sleeper();
  } else if (is_parked_) {
    unparked_.notify_one();
  }
}

void Mailbox::wake_sleeper() {
  links_.bell.prepare(links_.has_sockets ? Sleep::kPoll : Sleep::kFutex);
  links_.bell.ring();
}

}  // namespace ronde
