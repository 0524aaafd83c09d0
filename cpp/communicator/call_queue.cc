#include "communicator/call_queue.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "system/block_signals.h"

namespace ronde {
namespace {

// A call that other ranks have begun, too, ends within this time, unless it is large.
constexpr std::chrono::milliseconds kMomentToEnd{500};

}  // namespace

std::shared_ptr<QueuedCall> QueuedCall::over() {
  auto call = std::make_shared<QueuedCall>(Collective{}, false);
  call->finish();
  return call;
}

bool QueuedCall::spin() const {
  // As long as it takes to wake the queue's thread on another core and to make a small call. Yields the core, because
  // that thread may have been woken on this one.
  constexpr int kYields = 64;
  for (int yield = 0; spins_ && yield < kYields; ++yield) {
    if (!is_pending()) return true;
    sched_yield();
  }
  return !is_pending();
}

// The caller holds mutex_, or is in a forked child.
void CallQueue::check_usable() const {
  if (origin_.is_inherited()) throw UsageError("this communicator belongs to the parent of this forked process");
  if (!is_closing_) return;
  if (const auto failure = communicator_.failure()) throw Failure(*failure);
  throw UsageError("the communicator's call queue has been closed: " + closed_because_);
}

// The caller holds mutex_. In a signal handler in the middle of a call of this thread, every other call would wait for
// it.
void CallQueue::check_not_interrupted() const {
  if (!is_in_own_call()) return;
  throw UsageError("this communicator is in the middle of a call, which a signal handler has interrupted");
}

std::shared_ptr<QueuedCall> CallQueue::post(Collective collective) {
  collective.check(communicator_.rank(), communicator_.size());
  if (origin_.is_inherited()) check_usable();
  auto call = std::make_shared<QueuedCall>(std::move(collective), !communicator_.is_crowded());
  {
    std::lock_guard lock(mutex_);
    check_usable();
    check_not_interrupted();
    if (!thread_.joinable()) {
      const BlockSignals blocked;
      thread_ = std::thread([this] { work(); });
    }
    queued_.push_back(call);
  }
  has_work_.notify_one();  // without the lock, for which the thread would wait again
  return call;
}

bool CallQueue::try_run(const Collective& collective) {
  collective.check(communicator_.rank(), communicator_.size());
  if (origin_.is_inherited()) check_usable();
  {
    std::lock_guard lock(mutex_);
    check_usable();
    check_not_interrupted();
    if (is_running_ || !queued_.empty()) return false;
    is_running_ = true;
    runs_in_ = std::this_thread::get_id();
  }
  struct End {
    CallQueue& queue;
    ~End() { queue.end_run(); }
  } const end{*this};
  run(collective);
  return true;
}

void CallQueue::end_run() {
  std::lock_guard lock(mutex_);
  is_running_ = false;
  if (!queued_.empty()) has_work_.notify_one();
  if (is_closing_) is_idle_.notify_all();
}

// Makes a call. Any error but the communicator's own, such as a lack of memory, fails the communicator, because the
// other ranks wait in the call.
void CallQueue::run(const Collective& collective) {
  try {
    runner_.run(collective);
  } catch (const Failure&) {
    throw;
  } catch (const MismatchError&) {
    throw;
  } catch (const UsageError&) {
    throw;
  } catch (const Interrupted&) {
    throw;
  } catch (const std::exception& error) {
    communicator_.abort(std::string("failed in ") + name_of(collective.kind) + ": " + error.what());
    if (const auto failure = communicator_.failure()) throw Failure(*failure);
    throw;
  }
}

void CallQueue::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    has_work_.wait(lock, [this] { return is_closing_ || (!is_running_ && !queued_.empty()); });
    if (is_closing_) return;
    std::shared_ptr<QueuedCall> call = std::move(queued_.front());
    queued_.pop_front();
    is_running_ = true;
    runs_in_ = std::this_thread::get_id();
    lock.unlock();
    std::exception_ptr error;
    try {
      run(call->collective());
    } catch (...) {
      error = std::current_exception();
    }
    end_run();  // first, so that a thread that has waited for this call may make the next one itself
    if (error) {
      call->fail(std::move(error));
    } else {
      call->finish();
    }
    call.reset();
    lock.lock();
  }
}

void CallQueue::close(const std::string& reason) {
  if (origin_.is_inherited()) return;
  std::unique_lock lock(mutex_);
  if (is_closing_) {
    if (is_in_own_call()) return;  // a signal handler: the other thread that closes waits for the call under it
    return is_idle_.wait(lock, [this] { return is_closed_; });
  }
  is_closing_ = true;
  closed_because_ = reason;
  has_work_.notify_all();
  end_calls(lock, reason);
  std::thread thread = std::move(thread_);
  lock.unlock();
  if (thread.joinable()) thread.join();
  lock.lock();
  is_closed_ = true;
  is_idle_.notify_all();
}

// Ends the running call and those that have not begun.
void CallQueue::end_calls(std::unique_lock<std::mutex>& lock, const std::string& reason) {
  const auto is_over = [this] { return !is_running_; };
  const bool is_own = is_in_own_call();  // this is a signal handler, and the call goes on after it
  if (!is_own) is_idle_.wait_for(lock, kMomentToEnd, is_over);
  const auto calls = std::move(queued_);
  queued_.clear();
  if (is_running_ || !calls.empty()) {
    lock.unlock();
    communicator_.abort(reason);
    lock.lock();
  }
  if (!is_own) is_idle_.wait(lock, is_over);
  for (const auto& call : calls) {
    try {
      check_usable();
    } catch (...) {
      call->fail(std::current_exception());
    }
  }
}

}  // namespace ronde
