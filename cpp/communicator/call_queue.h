// The asynchronous collectives of one communicator, which run in the order of their posts.
//
// The rules:
//   1. One thread makes the queued calls. It starts with the first of them, and sleeps while there are none. A thread
//   of
//      the program may make a call itself if no call is queued or running (try_run), which saves two changes of
//      threads.
//   2. A call that fails does not stop the queue. After a Failure the communicator throws the same one at every later
//      call; after a UsageError, and a MismatchError within a host, the next call works.
//   3. The owner of the queue closes it before the communicator is destroyed. close() ends the thread: the running call
//      gets a moment; then it is aborted, as are the calls that have not begun, because other ranks may wait in them.
//   4. The memory of a call must exist until the call is over.
//   5. While calls are queued or running, no thread makes other collective calls on the communicator: their place in
//   the
//      order would differ between ranks.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "communicator/collective.h"
#include "communicator/communicator.h"
#include "system/inherited.h"
#include "waiting/completion.h"

namespace ronde {

// A collective that has been posted. Any thread.
class QueuedCall {
 public:
  QueuedCall(Collective collective, bool spins) : collective_(std::move(collective)), spins_(spins) {}

  // A call that is over.
  static std::shared_ptr<QueuedCall> over();

  const Collective& collective() const { return collective_; }
  bool is_pending() const { return completion_.is_pending(); }
  bool has_failed() const { return completion_.has_failed(); }
  // Whether a forked child has inherited the call: then it never ends.
  bool is_lost() const { return is_pending() && origin_.is_inherited(); }
  // The beginning of a wait, without a sleep. Returns whether the call is over.
  bool spin() const;
  // Sleeps until the call is over. Returns false if a signal comes first, or after `limit_ns`, at most a second.
  bool sleep(int64_t limit_ns) { return completion_.sleep(std::min(limit_ns, Completion::kLongestSleepNs)); }
  // Throws the error of a call that has failed.
  void check() const {
    if (has_failed()) std::rethrow_exception(error_);
  }

 private:
  friend class CallQueue;
  void finish() { completion_.finish(true); }
  void fail(std::exception_ptr error) {
    error_ = std::move(error);
    completion_.finish(false);
  }

  Collective collective_;
  Completion completion_;
  std::exception_ptr error_;  // before the completion says so
  const bool spins_;
  const ForkOrigin origin_;
};

class CallQueue {
 public:
  // `communicator` must live until close() has returned.
  explicit CallQueue(Communicator& communicator) : communicator_(communicator), runner_(communicator) {}
  ~CallQueue() { close("its call queue was destroyed"); }
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  // Throws UsageError if the arguments are invalid, or the queue is closed.
  std::shared_ptr<QueuedCall> post(Collective collective);
  // Makes the call in this thread, and throws its error. Returns false if it must be posted instead, because other
  // calls are queued or running.
  bool try_run(const Collective& collective);
  // Ends the calls, see rule 3, and the thread. A second call only waits for the end of the first one.
  void close(const std::string& reason);

  Communicator& communicator() const { return communicator_; }
  // Whether a forked child has inherited the queue, which is the parent's; it must not be destroyed.
  bool is_inherited() const { return origin_.is_inherited(); }

 private:
  void check_usable() const;
  void check_not_interrupted() const;
  bool is_in_own_call() const { return is_running_ && runs_in_ == std::this_thread::get_id(); }
  void work();
  void run(const Collective& collective);
  void end_run();
  void end_calls(std::unique_lock<std::mutex>& lock, const std::string& reason);

  Communicator& communicator_;
  CollectiveRunner runner_;  // used by the thread that has set is_running_
  const ForkOrigin origin_;

  std::mutex mutex_;                  // guards everything below
  std::condition_variable has_work_;  // for the thread: it may run a call, or must end
  std::condition_variable is_idle_;   // for close()
  std::deque<std::shared_ptr<QueuedCall>> queued_;
  bool is_running_ = false;
  std::thread::id runs_in_{};
  std::thread thread_;
  bool is_closing_ = false, is_closed_ = false;
  std::string closed_because_;
};

}  // namespace ronde
