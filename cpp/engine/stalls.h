// What ranks tell each other when tensors stall: who has submitted what, how far everybody is, and where he is stuck.
//
// A rank that asks gets its answers from the other ranks' watch threads, which need no interpreter: a rank that is
// stuck in a call that never lets go of it answers all the same. Only a stopped process does not answer. What to ask
// and what to report is decided elsewhere (ronde/core/stall.py), by the thread that calls next().
//
// Stacks: a rank that is asked for them first lets its interpreter answer, which tells more and disturbs nothing. If it
// has not after a moment, the watch thread takes them itself (stack_taker.h).
//
// Names travel as 64-bit hashes, here called ids.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "communicator.h"
#include "engine/cycle.h"
#include "engine/stack_taker.h"

namespace ronde {

class Stalls : private Watch::Listener {
 public:
  static constexpr size_t kMostIds = 2048;  // in one question

  Stalls(Communicator& communicator, Cycle& cycle);
  ~Stalls() override;

  // What has been submitted here and is not through.
  struct Item {
    uint64_t id;
    std::string name;
    Kind kind;
    int64_t since_ns;
    bool is_running;  // all ranks have submitted it, and this one executes it
  };
  struct Look {
    std::vector<Item> items;  // submitted before the time asked for, or among the ids asked for; the oldest first
    int64_t next_ns = -1;     // when the oldest of the others was submitted; -1: there is none
  };
  // Once it has found no others, next() ends when something is submitted.
  Look look(int64_t before_ns, std::span<const uint64_t> ids);

  struct Event {
    enum class Type { kAsked = 1, kAnswer = 2, kStacksWanted = 3, kStacks = 4 };
    Type type{};
    int rank = -1;
    uint32_t inquiry = 0;           // of kAnswer and kStacks: the own one that it belongs to
    std::vector<uint64_t> ids{};    // kAsked
    std::vector<bool> has{};        // kAnswer: by id that was asked for, whether the rank has submitted it
    uint64_t calls = 0;             // kAnswer: Cycle::progress()
    bool is_in_cold_round = false;  // kAnswer
    std::string text{};             // kStacks
    bool is_raw = false;            // kStacks: written by the signal handler
  };
  // Sleeps until something happens, until `at_ns` (steady clock; < 0: no limit), or, if look() has found nothing, until
  // something is submitted; returns what has happened, nothing when stop() was called.
  std::optional<std::vector<Event>> next(int64_t at_ns);
  void stop();

  // Asks all ranks, this one too; the answers come as events.
  void ask(uint32_t inquiry, std::span<const uint64_t> ids);
  void ask_for_stacks(uint32_t inquiry, int rank);
  // The interpreter's answer to kStacksWanted.
  void answer_stacks(uint32_t inquiry, int rank, const std::string& text);
  // How the watch thread takes stacks. `preface` goes before what the handler writes.
  void use_stacks(const StackTaker& taker, std::string preface);

  // By rank, the arrivals of all ranks; of a rank that has not answered in time, nothing.
  std::vector<std::optional<Cycle::Arrivals>> survey(int64_t timeout_ns);

  int process_of(int rank) { return communicator_.watch().process_of(rank); }
  // In a forked child, where no thread exists that could hold or release a lock.
  void abandon() { is_abandoned_ = true; }

 private:
  struct Want {
    int rank;
    uint32_t inquiry;
    int64_t until_ns;
  };
  using Answers = std::vector<std::optional<Cycle::Arrivals>>;

  void on_note(int peer, std::span<const uint32_t> words) override;
  void on_change() override;
  void on_alarm() override;
  void hear_question(int peer, std::span<const uint32_t> words);
  void hear_answer(int peer, std::span<const uint32_t> words);
  void hear_stacks(int peer, std::span<const uint32_t> words);
  std::vector<uint32_t> answer(uint32_t inquiry, std::span<const uint64_t> ids);
  void send_stacks(int rank, uint32_t inquiry, const std::string& text, bool is_raw);
  void send(int rank, std::span<const uint32_t> words);
  void push(Event event);
  void wake();

  Communicator& communicator_;
  Cycle& cycle_;
  std::mutex mutex_;
  std::condition_variable happened_;
  std::vector<Event> events_;  // and what follows: guarded by mutex_
  bool is_submitted_ = false;  // something, while nothing was pending
  bool stopping_ = false;
  std::deque<Want> wants_;  // stacks that this rank's interpreter has still to answer
  uint32_t surveys_ = 0;
  std::map<uint32_t, Answers*> surveyed_;
  StackTaker taker_;
  std::string preface_;
  bool is_abandoned_ = false;
  // Of the watch's thread: by rank, a question and stacks of which more is to come.
  std::map<int, std::vector<uint64_t>> questions_;
  std::map<int, std::string> arriving_;
};

}  // namespace ronde
