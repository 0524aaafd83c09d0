// What the inspections of all communicators of a process share: one queue of events, for one thread; the way to take
// stacks; and what the program's threads are blocked in, whichever communicator that belongs to.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stack_taker.h"
#include "waits.h"

namespace ronde {

class StallHub {
 public:
  // What a thread of a process sleeps in, the longest of all; of what is being executed nothing.
  struct Blocked {
    uint64_t where = 0;  // the hash of the communicator's label; 0: in nothing
    uint64_t id = 0;
    int64_t since_ns = 0;  // by the clock of its host
  };
  struct Event {
    enum class Type { kAsked = 1, kAnswer = 2, kStacksWanted = 3, kStacks = 4 };
    uint32_t member = 0;  // whose inspection it belongs to
    Type type{};
    int rank = -1;
    uint32_t inquiry = 0;           // of kAnswer and kStacks: the own one that it belongs to
    std::vector<uint64_t> ids{};    // kAsked
    std::vector<bool> has{};        // kAnswer: by id that was asked for, see Waits::has
    uint64_t calls = 0;             // kAnswer: Waits::Progress
    bool is_in_cold_round = false;  // kAnswer
    std::string text{};             // kAnswer: how far the rank is and what it waits for; kStacks
    bool is_raw = false;            // kStacks: written by the signal handler
    Blocked blocked{};              // kAnswer: what its process sleeps in
  };
  // Sleeps until something happens, until `at_ns` (steady clock; < 0: no limit), or until wake(); returns what has
  // happened, nothing when stop() was called.
  std::optional<std::vector<Event>> next(int64_t at_ns);
  void stop();
  void wake();
  void push(Event event);
  // In a forked child: holds nothing to let go of.
  void abandon() {}

  // `label`: the communicator's, the same on all its ranks. `waits` must live until leave().
  uint32_t join(const std::string& label, Waits* waits);
  void leave(uint32_t member);

  // What this process sleeps in, and the same in words.
  std::pair<Blocked, std::string> blocked();
  // Whether `id` of that communicator waits for this process to begin it.
  bool lacks(uint64_t where, uint64_t id);

  // How a watch thread takes stacks. `preface` goes before what the handler writes.
  void use_stacks(const StackTaker& taker, std::string preface);
  std::pair<StackTaker, std::string> stacks();

 private:
  struct Member {
    uint64_t where;
    Waits* waits;
  };

  std::mutex mutex_;
  std::condition_variable happened_;
  std::vector<Event> events_;  // and what follows: guarded by mutex_
  bool is_woken_ = false;
  bool stopping_ = false;
  StackTaker taker_;
  std::string preface_;

  std::mutex members_mutex_;
  std::map<uint32_t, Member> members_;
  uint32_t joined_ = 0;
};

}  // namespace ronde
