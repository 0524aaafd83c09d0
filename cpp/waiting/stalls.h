// The messages of the stall inspection: which rank has begun which call, how far each rank is, and where it is stuck.
//
// The other ranks' watch threads answer a question, without the interpreter, so a rank that is stuck in a call that
// holds the interpreter's lock answers, too. Only a stopped process does not answer. The thread that reads the hub's
// events decides what to ask and what to report (ronde/stall/inspector.py).
//
// Waits (waits.h) defines what a rank can wait for: calls in program order, or the engine's tensors. An answer also
// contains the longest wait of the process on any of its communicators, which reveals two ranks that wait for each
// other on different communicators.
//
// Stacks: a rank first lets its interpreter answer a request for them, because its answer is more detailed and disturbs
// nothing. If no answer comes in time, the watch thread takes the stacks (stack_taker.h).
//
// Names travel as 64-bit hashes, called ids here.
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

#include "communicator/communicator.h"
#include "waiting/stall_hub.h"
#include "waiting/waits.h"

namespace ronde {

class Stalls : private Watch::Listener {
 public:
  static constexpr size_t kMostIds = 1024;  // in one question

  // `label`: the communicator's, equal on all its ranks and different from their other communicators' labels.
  Stalls(Communicator& communicator, std::unique_ptr<Waits> waits, std::shared_ptr<StallHub> hub,
         const std::string& label);
  ~Stalls() override { close(); }
  // From here on it neither answers nor pushes events.
  void close();
  // The number of its events.
  uint32_t member() const { return member_; }

  // The calls or tensors that this rank has begun and not finished.
  struct FoundWaits {
    std::vector<Waits::Item> items;  // those begun before `before_ns`, and those in `ids`; the oldest first
    int64_t next_ns = -1;            // when the oldest of the others began; -1: there are no others
  };
  // If there are no others, the hub wakes when something begins.
  FoundWaits find_waits(int64_t before_ns, std::span<const uint64_t> ids);

  using Event = StallHub::Event;

  // Asks all ranks, this one too; the answers come as events. `leads_to_report`: the other ranks get an event, too.
  void ask(uint32_t inquiry, std::span<const uint64_t> ids, bool leads_to_report);
  // Asks all ranks whether they have begun the calls in `blocked`, on any communicator. The answers come as events.
  void ask_about(uint32_t inquiry, std::span<const StallHub::Blocked> blocked);
  void ask_for_stacks(uint32_t inquiry, int rank);
  // Sends the interpreter's answer to kStacksWanted.
  void answer_stacks(uint32_t inquiry, int rank, const std::string& text);
  // The arrivals of all ranks, by rank; nothing for a rank that has not answered in time.
  std::vector<std::optional<Waits::Arrivals>> survey(int64_t timeout_ns);

  int process_of(int rank) { return communicator_.watch().process_of(rank); }
  // Fails the communicator on every rank.
  void abort(const std::string& reason) { communicator_.abort(reason); }
  // For a forked child, where no other thread exists to release a lock.
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
    kReports = 1,  // the same; a report follows
    kProcess = 2,  // pairs of a communicator and an id there
  };

  void on_note(int peer, std::span<const uint32_t> words) override;
  void on_change() override;
  void on_alarm() override;
  void on_long_call() override { hub_->wake(); }
  void on_question(int peer, std::span<const uint32_t> words);
  void on_answer(int peer, std::span<const uint32_t> words);
  void on_stacks(int peer, std::span<const uint32_t> words);
  void ask(uint32_t inquiry, std::span<const uint64_t> ids, Question question);
  std::vector<bool> have_begun(std::span<const uint64_t> ids, Question question);
  std::vector<uint32_t> answer(uint32_t inquiry, std::span<const uint64_t> ids, Question question);
  void send_stacks(int rank, uint32_t inquiry, const std::string& text, bool is_raw);
  void send(int rank, std::span<const uint32_t> words);
  void push(Event event);

  Communicator& communicator_;
  std::unique_ptr<Waits> waits_;
  std::shared_ptr<StallHub> hub_;
  uint32_t member_;
  std::mutex mutex_;
  std::condition_variable answered_;  // for surveys
  std::deque<Want> wants_;            // requests for stacks without the interpreter's answer yet; guarded by mutex_
  uint32_t surveys_ = 0;              // mutex_ guards this and the next three
  std::map<uint32_t, Answers*> surveyed_;
  bool is_closed_ = false;
  bool is_abandoned_ = false;
  // Used by the watch's thread only: incomplete questions and stacks, by rank.
  std::map<int, std::vector<uint64_t>> questions_;
  std::map<int, std::string> arriving_;
};

}  // namespace ronde
