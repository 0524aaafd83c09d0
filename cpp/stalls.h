// What ranks tell each other when something stalls: who has begun what, how far every rank is, and where it is stuck.
//
// A rank that asks gets its answers from the other ranks' watch threads, which need no interpreter: a rank that is
// stuck in a call that never lets go of it answers all the same. Only a stopped process does not answer. What to ask
// and what to report is decided elsewhere (ronde/core/stall.py), by the thread that reads the hub's events.
//
// What can be waited for is the business of Waits (waits.h): calls in program order, or the engine's tensors. An answer
// also says in what the process is blocked on any of its communicators, so two ranks that wait for each other on
// different ones are found.
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
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "communicator.h"
#include "stall_hub.h"
#include "waits.h"

namespace ronde {

class Stalls : private Watch::Listener {
 public:
  static constexpr size_t kMostIds = 1024;  // in one question

  // `label`: the communicator's, the same on all its ranks and of no other communicator of theirs.
  Stalls(Communicator& communicator, std::unique_ptr<Waits> waits, std::shared_ptr<StallHub> hub,
         const std::string& label);
  ~Stalls() override { close(); }
  // Answers no more, and pushes no events.
  void close();
  // The number of its events.
  uint32_t member() const { return member_; }

  // What has begun here and is not over.
  struct Look {
    std::vector<Waits::Item> items;  // begun before the time asked for, or among the ids asked for; the oldest first
    int64_t next_ns = -1;            // when the oldest of the others began; -1: there is none
  };
  // Once it has found no others, the hub wakes when something begins.
  Look look(int64_t before_ns, std::span<const uint64_t> ids);

  using Event = StallHub::Event;

  // Asks all ranks, this one too; the answers come as events. `leads_to_report`: the others get an event of it.
  void ask(uint32_t inquiry, std::span<const uint64_t> ids, bool leads_to_report);
  // Asks all ranks whether they have begun what processes sleep in, on any communicator; the answers are events, too.
  void ask_about(uint32_t inquiry, std::span<const StallHub::Blocked> blocked);
  void ask_for_stacks(uint32_t inquiry, int rank);
  // The interpreter's answer to kStacksWanted.
  void answer_stacks(uint32_t inquiry, int rank, const std::string& text);
  // By rank, the arrivals of all ranks; of a rank that has not answered in time, nothing.
  std::vector<std::optional<Waits::Arrivals>> survey(int64_t timeout_ns);

  int process_of(int rank) { return communicator_.watch().process_of(rank); }
  // Fails the communicator on every rank.
  void abort(const std::string& reason) { communicator_.abort(reason); }
  // In a forked child, where no thread exists that could hold or release a lock.
  void abandon() { is_abandoned_ = true; }

 private:
  struct Want {
    int rank;
    uint32_t inquiry;
    int64_t until_ns;
  };
  using Answers = std::vector<std::optional<Waits::Arrivals>>;
  enum class Question : uint32_t {
    kSilent = 0,   // ids of this communicator
    kReports = 1,  // the same, and a report follows
    kProcess = 2,  // pairs of a communicator and an id there
  };

  void on_note(int peer, std::span<const uint32_t> words) override;
  void on_change() override;
  void on_alarm() override;
  void on_long_call() override { hub_->wake(); }
  void hear_question(int peer, std::span<const uint32_t> words);
  void hear_answer(int peer, std::span<const uint32_t> words);
  void hear_stacks(int peer, std::span<const uint32_t> words);
  void ask(uint32_t inquiry, std::span<const uint64_t> ids, Question question);
  std::vector<bool> have(std::span<const uint64_t> ids, Question question);
  std::vector<uint32_t> answer(uint32_t inquiry, std::span<const uint64_t> ids, Question question);
  void send_stacks(int rank, uint32_t inquiry, const std::string& text, bool is_raw);
  void send(int rank, std::span<const uint32_t> words);
  void push(Event event);

  Communicator& communicator_;
  std::unique_ptr<Waits> waits_;
  std::shared_ptr<StallHub> hub_;
  uint32_t member_;
  std::mutex mutex_;
  std::condition_variable answered_;  // a survey
  std::deque<Want> wants_;            // stacks that this rank's interpreter has still to answer; guarded by mutex_
  uint32_t surveys_ = 0;              // and what follows: guarded by mutex_
  std::map<uint32_t, Answers*> surveyed_;
  bool is_closed_ = false;
  bool is_abandoned_ = false;
  // Of the watch's thread: by rank, a question and stacks of which more is to come.
  std::map<int, std::vector<uint64_t>> questions_;
  std::map<int, std::string> arriving_;
};

}  // namespace ronde
