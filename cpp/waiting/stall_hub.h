// The parts of the stall inspection that all communicators of a process share: one queue of events, for one thread; the
// way to take stacks; and the longest wait of the program's threads, on any communicator.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "waiting/stack_taker.h"
#include "waiting/waits.h"

namespace ronde {

class StallHub {
 public:
  // The wait in which a thread of a process has slept the longest. Running operations do not count.
  struct Blocked {
    uint64_t where = 0;  // the hash of the communicator's label; 0: no thread sleeps
    uint64_t id = 0;
    int64_t since_ns = 0;  // by the clock of its host
  };
  struct Event {
    enum class Type { kAsked = 1, kAnswer = 2, kStacksWanted = 3, kStacks = 4 };
    uint32_t member = 0;  // the communicator's number in join()
    Type type{};
    int rank = -1;
    uint32_t inquiry = 0;            // kAnswer and kStacks: this rank's inquiry that it answers
    std::vector<uint64_t> ids{};     // kAsked
    std::vector<bool> has{};         // kAnswer: for each id in the question, see Waits::have_begun
    uint64_t calls = 0;              // kAnswer: Waits::Progress
    bool is_in_negotiation = false;  // kAnswer
    std::string text{};              // kAnswer: the rank's progress and its wait; kStacks: the stacks
    bool is_raw = false;             // kStacks: the signal handler wrote them
    Blocked blocked{};               // kAnswer: the longest wait of its process
  };
  // Sleeps until an event comes, until `at_ns` (steady clock; < 0: no limit), or until wake(). Returns the events, or
  // nothing after stop().
  std::optional<std::vector<Event>> next_events(int64_t at_ns);
  void stop();
  void wake();
  void push(Event event);
  // For a forked child: there is nothing to release.
  void abandon() {}

  // `label`: the communicator's, the same on all its ranks. `waits` must live until leave().
  uint32_t join(const std::string& label, Waits* waits);
  void leave(uint32_t member);

  // The longest wait of this process, and its description.
  std::pair<Blocked, std::string> blocked();
  // Whether other ranks wait for this process to begin `id` on that communicator.
  bool lacks(uint64_t where, uint64_t id);

  // Sets how a watch's thread takes stacks. `preface` precedes the handler's text.
  void use_stacks(const StackTaker& taker, std::string preface);
  std::pair<StackTaker, std::string> stacks();

 private:
  struct Member {
    uint64_t where;
    Waits* waits;
  };

  std::mutex mutex_;
  std::condition_variable happened_;
  std::vector<Event> events_;  // mutex_ guards this and everything below
  bool is_woken_ = false;
  bool stopping_ = false;
  StackTaker taker_;
  std::string preface_;

  std::mutex members_mutex_;
  std::map<uint32_t, Member> members_;
  uint32_t joined_ = 0;
};

}  // namespace ronde
