// The hot path: cached tensors are submitted, found ready, fused, run and completed without the interpreter.
//
// Submitting sets a bit (board.h). What all ranks have submitted is decided by the leaders (leader.h), and everybody
// reads in the log what runs next.
//
// Whatever is not cached goes through a cold round: every rank finds kColdEntry in the log, and its engine thread
// leaves run() to negotiate in Python (ronde/engine). Slots change only there, so all ranks change them at the same
// place of the log; hot decisions rest until all ranks are through.
//
// One thread at a time does a step: the engine's thread, which sleeps while there is nothing, or a thread that waits
// for a tensor, for which no other thread is then woken.
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

#include "communicator.h"
#include "engine/board.h"
#include "engine/completion.h"
#include "engine/leader.h"
#include "engine/meter.h"
#include "engine/pending.h"
#include "engine/recorder.h"
#include "engine/runner.h"
#include "engine/signature.h"
#include "function_ref.h"

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
  // `board` (Board::bytes(capacity) long, zero) and `buffer`: symmetric memory of this communicator.
  // `linger_ns`: so long a decision may wait for more tensors while nobody waits for one. `keeps_groups_apart`: see
  // Runner. `arity`: how many hosts report to one (tree.h).
  Cycle(Communicator& communicator, std::byte* board, size_t capacity, std::byte* buffer, size_t buffer_bytes,
        int64_t linger_ns, bool keeps_groups_apart, size_t arity);
  ~Cycle() override;

  // Submits a tensor. `waits`: the caller is going to call wait() at once. The memory stays in use until the completion
  // is finished. Throws Failure when nothing can run any more.
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
  // `memory`: of each tensor of the group, or of the single one; of a barrier nothing.
  Submitted submit(std::string_view name, const Signature& signature, std::span<const Memory> memory, bool waits);

  // Waits for a completion; false if it is still pending. First with kDrive, which does the engine's steps as long as
  // it may be over soon; then with kSleep, which sleeps until it is over, a signal comes or a second has passed. Look
  // for signals in between: one that came during the steps has interrupted nothing. Throws Interrupted.
  enum class Patience { kDrive, kSleep };
  bool wait(Completion& completion, Patience patience);

  // Somebody wants to know whether a tensor is through: what is ready runs now.
  void hurry();

  // For the engine's thread: does steps and sleeps, until a cold round is due or stop() was called. Throws Failure.
  enum class Event { kCold, kStopped };
  Event run();
  void stop();

  // In a cold round: the cache as the ordered stream changes it; tensors that run; the end of the round.
  void insert(uint32_t slot, std::string name, Signature signature, std::vector<uint64_t> rows);
  // The completion of a tensor that was submitted and not decided, if there is one: it is not going to run from here.
  // take_back() leaves the slot as it is.
  std::shared_ptr<Completion> evict(uint32_t slot);
  std::shared_ptr<Completion> take_back(uint32_t slot);
  // add_cold(): a tensor (or a group) that the round has decided. run_cold(): all of them, fused like what comes from
  // the log; all ranks add the same before they run it. `contributors`: an average is divided by so many. With
  // `is_absent` this rank contributes neutral elements.
  void add_cold(std::string_view name, const Signature& signature, const std::vector<uint64_t>& rows,
                std::span<const Memory> memory, int contributors, bool is_absent);
  void run_cold();
  // begin_cold(): the engine's thread has come to the round, which waits for it.
  void begin_cold();
  void end_cold();
  // Slots that have run since the last time, each once, the latest use last.
  std::vector<uint32_t> take_used();

  // How batches are made and run. tune() is called in a cold round, or before the first submission.
  Tunables tunables() const;
  void tune(const Tunables& values);
  // Rank 0 measures for tuning. It asks for a cold round when the meter has all samples.
  Meter& meter() { return meter_; }

  // Asks for a cold round.
  void want_cold();

  // This rank has run out of data, and submits nothing until resume(). From the cold round on in which all hear of it,
  // absent(), it contributes neutral elements to whatever is decided.
  void join();
  void absent();
  void resume();
  // In a cold round: what comes after it has so many contributors, by which an average is divided.
  void set_contributors(int contributors) { contributors_ = contributors; }
  // Who carries the collectives; to be chosen before anything is submitted.
  Backends& backends() { return runner_.backends(); }
  // What it tells the timeline; in cold rounds Python does.
  Recorder& recorder() { return recorder_; }

  // Fails what is pending and all that comes, when nothing of it runs any more. Nobody else is told.
  void give_up(const Failure& failure);
  std::optional<Failure> failure() const;

  // For whoever looks for stalls (stalls.h). Any thread.
  Pending& pending() { return pending_; }
  void visit_pending(const Pending::Visit& visit);
  bool is_in_cold_round() const { return in_cold_.load(); }
  // Collective calls and cold rounds that the engine's thread has come to; not those for which its interpreter does not
  // let it on.
  uint64_t progress() const { return communicator_.watch().calls_begun() + cold_entered_.load(); }
  bool has_joined() {
    std::lock_guard lock(table_);
    return has_joined_;
  }
  // Of hits, so far: how many ran, of how many this rank was the last of its host, and how long they waited in sum.
  struct Arrivals {
    uint64_t tensors = 0;
    uint64_t last = 0;
    int64_t waited_ns = 0;
  };
  Arrivals arrivals() const { return {ran_.load(), last_.load(), waited_ns_.load()}; }

  // In a forked child: the board is the parent's, so all that comes is refused.
  void abandon() { is_abandoned_.store(true); }
  // This thread is in the middle of a step, which a signal handler has interrupted.
  bool is_stepping() const { return stepper_.load() == std::this_thread::get_id(); }

 private:
  class Stepping;
  enum class Step { kNothing, kDid, kCold };
  struct Tensor {
    Signature signature;
    std::vector<uint64_t> rows;
    Memory memory;
  };
  struct ColdRun {
    std::vector<Tensor> tensors;
    int contributors;
    bool is_absent;
  };
  struct Slot {
    bool is_used = false;
    std::string name;
    Signature signature;
    size_t bytes = 0;
    std::vector<Tensor> tensors;  // of the group; one, if it is none
    size_t to_run = 0;            // of those of a batch that is running
    std::shared_ptr<Completion> completion;
    uint64_t last_use = 0;
    bool is_metered = false;  // the pending submission

    bool is_pending() const { return completion && completion->is_pending(); }
  };
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };

  void on_note(int peer, std::span<const uint32_t> words) override;
  void on_change() override;

  Step step(bool hands_over);
  Step take_entry(bool hands_over);
  void run_slots(const std::vector<uint32_t>& slots);
  std::shared_ptr<Completion> take_back(Slot& slot, uint32_t index);
  std::vector<Tensor> tensors_of(const Signature& signature, const std::vector<uint64_t>& rows) const;
  // Checks a part of what a peer has sent in a cold round. If it is malformed, the peer counts as lost.
  void check_sent(FunctionRef<void()> check) const {
    try {
      check();
    } catch (const ProtocolError& error) {
      communicator_.watch().distrust(error);
      throw communicator_.failure().value();
    }
  }
  bool has_work() const;
  void refuse() const;
  void drive(Completion& completion);
  void fail(const Failure& failure);
  void tell_leader(uint64_t bytes, bool waits);

  Communicator& communicator_;
  int local_rank_;
  Board board_;
  Recorder recorder_;
  Runner runner_;
  Leader leader_;  // guarded by stepping_
  Meter meter_;
  int spins_, yields_;

  std::mutex table_;  // guards the slots' contents between submitting threads and cold rounds
  std::vector<Slot> slots_;
  std::unordered_map<std::string, uint32_t, Hash, std::equal_to<>> slot_of_;
  std::vector<uint32_t> used_;
  uint64_t uses_ = 0;
  bool has_joined_ = false;  // this rank submits nothing
  std::atomic<int> contributors_;

  Pending pending_;
  std::atomic<uint64_t> ran_{0}, last_{0};  // see arrivals()
  std::atomic<int64_t> waited_ns_{0};

  std::mutex stepping_;
  std::atomic<std::thread::id> stepper_{};  // who holds it
  std::atomic<bool> is_abandoned_{false};
  std::atomic<uint64_t> taken_{0};     // words of the log that this rank has read
  std::atomic<bool> in_cold_{false};   // a cold round is going on
  std::atomic<bool> cold_due_{false};  // one was found by a thread other than the engine's
  std::atomic<uint64_t> cold_begun_{0};
  std::atomic<uint64_t> cold_entered_{0};
  std::vector<ColdRun> cold_runs_;  // of the engine's thread
  std::atomic<bool> stopping_{false};

  std::atomic<bool> failed_{false};
  std::atomic<bool> changed_{false};
  mutable std::mutex failing_;
  std::optional<Failure> failure_;
};

}  // namespace ronde
