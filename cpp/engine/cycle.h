// The hot path: submits, fuses, runs and completes cached tensors without the interpreter.
//
// A submission flips a bit (board.h). The leaders decide which of the tensors that all ranks have submitted run next
// (leader.h), and every rank reads the decisions in the log.
//
// A tensor that is not cached goes through a negotiation round: every rank finds kNegotiationEntry in the log, and its
// engine thread leaves run() to negotiate in Python (ronde/engine). Slots change only there, so all ranks change them
// at the same place of the log. Hot decisions pause until all ranks have finished the round.
//
// One thread at a time does a step: the engine's thread, which sleeps while there is nothing to do, or a driver: a
// thread that waits for a tensor. While there is a driver, other ranks wake it instead of the engine's thread, which
// would do the step and then wake the waiting thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/function_ref.h"
#include "communicator/communicator.h"
#include "engine/board.h"
#include "engine/leader.h"
#include "engine/meter.h"
#include "engine/pending.h"
#include "engine/recorder.h"
#include "engine/runner.h"
#include "engine/signature.h"
#include "waiting/completion.h"

namespace ronde {

struct Tunables {
  size_t fusion_bytes;
  int64_t linger_ns;
  uint64_t batch_bytes;
  size_t largest_fused_bytes;
  SwitchOver switch_over;
};

class Cycle : private Watch::Listener {
 public:
  // `board` (Board::bytes(capacity) bytes, zero) and `buffer`: symmetric memory of this communicator. `linger_ns`: how
  // long a decision may wait for more tensors while no thread waits for one. `keeps_groups_apart`: see Runner. `arity`:
  // how many hosts report to one (tree.h).
  Cycle(Communicator& communicator, std::byte* board, size_t capacity, std::byte* buffer, size_t buffer_bytes,
        int64_t linger_ns, bool keeps_groups_apart, size_t arity);
  ~Cycle() override;

  // Submits a tensor. `waits`: the caller calls wait() next, whatever happens: for that, the leader may not have been
  // woken. The memory stays in use until the completion is finished. Throws Failure if the engine has failed.
  enum class Answer { kHit, kMiss, kInFlight };
  struct Submitted {
    Answer answer;
    uint32_t slot = 0;
    std::shared_ptr<Completion> completion;
  };
  struct Memory {
    const void* in = nullptr;
    void* out = nullptr;
  };
  // `memory`: one entry per tensor of the group, one entry for a single tensor, none for a barrier.
  Submitted submit(std::string_view name, const Signature& signature, std::span<const Memory> memory, bool waits);

  // Waits for a completion; false if it is still pending. Call it first with kDrive, which spins for a limited time and
  // does the engine's steps meanwhile; then with kSleep, which sleeps until the completion is finished, a signal comes
  // or a second has passed. One of the sleeping threads also does the steps. Check for signals in between: one during
  // the steps interrupts nothing. Throws Interrupted.
  enum class Patience { kDrive, kSleep };
  bool wait(Completion& completion, Patience patience);

  // Makes ready tensors run without lingering. For a caller that asks whether a tensor is finished without waiting.
  void hurry();

  // The loop of the engine's thread: does steps and sleeps until a negotiation round is due or stop() is called. Throws
  // Failure.
  enum class Event { kNegotiate, kStopped };
  Event run();
  void stop();

  // Called in a negotiation round, from here to end_negotiation(). insert() fills a slot of the cache.
  void insert(uint32_t slot, std::string name, Signature signature, std::vector<uint64_t> rows);
  // Both withdraw the slot's tensor if it is submitted and not decided, and return its completion: the tensor does not
  // run from here. evict() also empties the slot, take_back() keeps it.
  std::shared_ptr<Completion> evict(uint32_t slot);
  std::shared_ptr<Completion> take_back(uint32_t slot);
  // add_miss() adds a tensor (or a group) that the round has decided. run_misses() runs all added tensors, fused like
  // those of a log entry; all ranks must have added the same. `contributors`: the divisor of an average. With
  // `is_absent` this rank contributes neutral elements.
  void add_miss(std::string_view name, const Signature& signature, const std::vector<uint64_t>& rows,
                std::span<const Memory> memory, int contributors, bool is_absent);
  void run_misses();
  // begin_negotiation(): the engine's thread enters the round.
  void begin_negotiation();
  void end_negotiation();
  // The slots that have run since the last call, each once, the most recent last.
  std::vector<uint32_t> take_used();

  // Parameters of batching and fusion. Call tune() in a negotiation round, or before the first submission.
  Tunables tunables() const;
  void tune(const Tunables& values);
  // Rank 0's measurements for tuning. It asks for a negotiation round when the meter has all samples.
  Meter& meter() { return meter_; }

  // Asks for a negotiation round.
  void want_negotiation();

  // join(): this rank has run out of data and submits nothing until resume(). absent(), called in the negotiation round
  // that announces this to all ranks: from then on this rank contributes neutral elements to every decided tensor.
  void join();
  void absent();
  void resume();
  // In a negotiation round: sets the number of contributors, the divisor of an average, for the tensors after it.
  void set_contributors(int contributors) { contributors_ = contributors; }
  // The libraries that run the collectives. Choose them before the first submission.
  Backends& backends() { return runner_.backends(); }
  // Records events for the timeline. In negotiation rounds Python calls it.
  Recorder& recorder() { return recorder_; }

  // Fails all pending and later submissions, once the running step has ended. Does not notify other ranks.
  void give_up(const Failure& failure);
  std::optional<Failure> failure() const;

  // For the detection of stalls (stalls.h). Any thread.
  Pending& pending() { return pending_; }
  void visit_pending(const Pending::Visit& visit);
  bool is_in_negotiation() const { return in_negotiation_.load(); }
  // Counts the collective calls and negotiation rounds that the engine's thread has begun. A thread that waits for the
  // interpreter has not begun its round.
  uint64_t progress() const { return communicator_.watch().calls_begun() + negotiations_entered_.load(); }
  bool has_joined() {
    std::lock_guard lock(table_);
    return has_joined_;
  }
  // Totals over all hits: how many ran, how many this rank submitted last of its host, and how long they waited.
  struct Arrivals {
    uint64_t tensors = 0;
    uint64_t last = 0;
    int64_t waited_ns = 0;
  };
  Arrivals arrivals() const { return {ran_.load(), last_.load(), waited_ns_.load()}; }

  // In a forked child, where the board belongs to the parent: later calls throw UsageError.
  void abandon() { is_abandoned_.store(true); }
  // Whether the calling thread is inside a step: a signal handler has interrupted it.
  bool is_stepping() const { return stepper_.load() == std::this_thread::get_id(); }

 private:
  class Stepping;
  enum class Step { kNothing, kDid, kNegotiate };
  struct Tensor {
    Signature signature;
    std::vector<uint64_t> rows;
    Memory memory;
  };
  struct DecidedMiss {
    std::vector<Tensor> tensors;
    int contributors;
    bool is_absent;
  };
  struct Slot {
    bool is_used = false;
    std::string name;
    Signature signature;
    size_t bytes = 0;
    std::vector<Tensor> tensors;  // those of the group, or the single one
    size_t to_run = 0;            // how many of them the running batch has yet to finish
    std::shared_ptr<Completion> completion;
    uint64_t last_use = 0;
    bool is_metered = false;  // the meter counts the pending submission

    bool is_pending() const { return completion && completion->is_pending(); }
  };
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };

  void on_note(int peer, std::span<const uint32_t> words) override;
  void on_change() override;

  Step do_step(bool hands_over);
  Step take_entry(bool hands_over);
  void run_slots(const std::vector<uint32_t>& slots);
  std::shared_ptr<Completion> take_back(Slot& slot, uint32_t index);
  std::vector<Tensor> tensors_of(const Signature& signature, const std::vector<uint64_t>& rows) const;
  // Runs a check of data that rank 0 has sent in a negotiation round. If the data is malformed, rank 0 counts as lost.
  void check_sent(FunctionRef<void()> check) const {
    try {
      check();
    } catch (const ProtocolError& error) {
      communicator_.watch().distrust(error);
      throw communicator_.failure().value();
    }
  }
  bool has_work() const;
  void check_usable() const;
  bool can_step() const { return !in_negotiation_.load() && has_work(); }
  void drive(Completion& completion);
  void sleep_as_driver(Completion& completion);
  void fail(const Failure& failure);
  void notify_leader(uint64_t bytes, bool waits);

  Communicator& communicator_;
  int local_rank_;
  Board board_;
  Recorder recorder_;
  Runner runner_;
  Leader leader_;  // guarded by stepping_
  Meter meter_;
  int spins_, yields_;

  std::mutex table_;  // guards the slots' contents between submitting threads and negotiation rounds
  std::vector<Slot> slots_;
  size_t slots_in_use_ = 0;  // beyond them no slot has ever held a tensor
  std::unordered_map<std::string, uint32_t, Hash, std::equal_to<>> slot_of_;
  std::vector<uint32_t> used_;
  uint64_t uses_ = 0;
  bool has_joined_ = false;  // this rank submits nothing
  std::atomic<int> contributors_;

  Pending pending_;
  std::atomic<uint64_t> ran_{0}, last_{0};  // see arrivals()
  std::atomic<int64_t> waited_ns_{0};

  std::mutex stepping_;
  std::atomic<std::thread::id> stepper_{};  // the thread that holds stepping_
  class Driving;
  const BellHandle drivers_bell_;
  std::mutex sleeping_driver_;  // only the thread that holds it sleeps on the drivers' bell
  std::atomic<bool> is_abandoned_{false};
  std::atomic<uint64_t> taken_{0};            // words of the log that this rank has read
  std::atomic<bool> in_negotiation_{false};   // a negotiation round is running
  std::atomic<bool> negotiation_due_{false};  // a thread other than the engine's has read its entry
  std::atomic<uint64_t> negotiations_begun_{0};
  std::atomic<uint64_t> negotiations_entered_{0};
  std::vector<DecidedMiss> decided_misses_;  // of the engine's thread
  std::atomic<bool> stopping_{false};

  std::atomic<bool> failed_{false};
  std::atomic<bool> changed_{false};
  mutable std::mutex failing_;
  std::optional<Failure> failure_;
};

}  // namespace ronde
