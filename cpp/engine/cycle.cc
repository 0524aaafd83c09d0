#include "engine/cycle.h"

#include <algorithm>
#include <utility>

#include "base/steady_clock.h"
#include "engine/rows.h"
#include "system/block_signals.h"

namespace ronde {
namespace {

std::vector<std::byte*> parts_of(const Communicator& communicator, std::byte* own, size_t bytes) {
  const Place place = communicator.symmetric()->place_of(own, bytes);
  if (place.segment == 0) throw UsageError("the engine needs symmetric memory");
  std::vector<std::byte*> parts;
  for (int local = 0; local < communicator.local_size(); ++local) {
    parts.push_back(communicator.symmetric()->resolve(place, local, bytes));
  }
  return parts;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Cycle::Cycle(Communicator& communicator, std::byte* board, size_t capacity, std::byte* buffer, size_t buffer_bytes,
             int64_t linger_ns, bool keeps_groups_apart, size_t arity)
    : communicator_(communicator),
      local_rank_(communicator.local_rank()),
      board_(parts_of(communicator, board, Board::bytes(capacity)), communicator.local_rank(), capacity),
      recorder_(communicator, board_, capacity),
      runner_(communicator, recorder_, buffer, buffer_bytes, keeps_groups_apart),
      leader_(communicator, board_, capacity, linger_ns, arity),
      slots_(capacity),
      contributors_(communicator.size()),
      drivers_bell_(board_.drivers_bell(local_rank_)) {
  const bool crowded = communicator.is_crowded();
  spins_ = crowded ? 16 : 200;
  yields_ = crowded ? 16 : 10;
  communicator_.watch().set_listener(this);
}

Cycle::~Cycle() {
  if (!is_abandoned_.load()) communicator_.watch().set_listener(nullptr);
}

// Holds the right to do steps.
class Cycle::Stepping {
 public:
  explicit Stepping(Cycle& cycle) : cycle_(cycle), lock_(cycle.stepping_) { set_stepper(); }
  Stepping(Cycle& cycle, std::try_to_lock_t wanted) : cycle_(cycle), lock_(cycle.stepping_, wanted) { set_stepper(); }
  ~Stepping() {
    if (lock_.owns_lock()) cycle_.stepper_.store({});
  }
  Stepping(const Stepping&) = delete;
  Stepping& operator=(const Stepping&) = delete;
  bool is_ours() const { return lock_.owns_lock(); }

 private:
  void set_stepper() {
    if (lock_.owns_lock()) cycle_.stepper_.store(std::this_thread::get_id());
  }
  Cycle& cycle_;
  std::unique_lock<std::mutex> lock_;
};

// Refuses calls in a forked child, and from a signal handler that has interrupted a step.
void Cycle::check_usable() const {
  if (is_abandoned_.load()) throw UsageError("this engine belongs to the parent of this forked process");
  if (is_stepping()) {
    throw UsageError("the engine is in the middle of an operation, which a signal handler has interrupted");
  }
}

// --- Submitting and waiting ----------------------------------------------------------------------------------------

Cycle::Submitted Cycle::submit(std::string_view name, const Signature& signature, std::span<const Memory> memory,
                               bool waits) {
  check_usable();
  if (failed_.load()) throw *failure();
  std::shared_ptr<Completion> completion;
  uint32_t index = 0;
  {
    std::lock_guard lock(table_);
    if (has_joined_) {
      throw UsageError("tensor '" + std::string(name) +
                       "' is submitted although this rank has joined: wait until all have");
    }
    const auto found = slot_of_.find(name);
    if (found == slot_of_.end()) return {Answer::kMiss, 0, nullptr};
    index = found->second;
    Slot& slot = slots_[index];
    if (slot.is_pending()) return {Answer::kInFlight, 0, nullptr};
    if (slot.signature != signature) return {Answer::kMiss, 0, nullptr};
    if (memory.size() != slot.tensors.size()) {
      throw UsageError("group '" + std::string(name) + "' has " + std::to_string(slot.tensors.size()) +
                       " tensors, but memory for " + std::to_string(memory.size()));
    }
    completion = slot.completion = std::make_shared<Completion>();
    for (size_t i = 0; i < memory.size(); ++i) slot.tensors[i].memory = memory[i];
    if (board_.is_timed()) [[unlikely]]
      recorder_.submitted(index, name, signature.kind);
    slot.is_metered = meter_.is_on();
    if (slot.is_metered) meter_.submitted();
    const bool is_ready = board_.flip(index);
    board_.note_change();
    if (is_ready) {
      last_.store(last_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      notify_leader(slot.bytes, waits);
    }
  }
  pending_.note_submission();
  if (failed_.load()) completion->finish(false);  // fail() may have run before the completion existed
  return {Answer::kHit, index, std::move(completion)};
}

// A tensor has become ready on this host: wakes the leader, unless it lingers and there is not enough for a decision
// yet. A thread of the leader's rank that is about to wait checks the board instead.
void Cycle::notify_leader(uint64_t bytes, bool waits) {
  if (waits && leader_.leads()) return;
  const Board::Counters& leader = board_.counters(0);
  const uint64_t ready = board_.add_ready_bytes(bytes);
  if (leader.lingers.load(std::memory_order_seq_cst) == 0 || ready >= leader_.batch_bytes()) board_.ring(0);
}

bool Cycle::wait(Completion& completion, Patience patience) {
  if (!completion.is_pending()) return true;
  check_usable();
  std::atomic<uint32_t>& waiting = board_.counters().waiting;
  waiting.fetch_add(1, std::memory_order_seq_cst);
  const auto leave = [&](bool finished) {
    waiting.fetch_sub(1, std::memory_order_seq_cst);
    return finished;
  };
  try {
    board_.note_change();
    const bool looks_itself = leader_.leads() && patience == Patience::kDrive;
    if (!looks_itself && board_.counters(0).lingers.load(std::memory_order_seq_cst) != 0) board_.ring(0);
    if (patience == Patience::kDrive) {
      drive(completion);
    } else if (const std::unique_lock alone(sleeping_driver_, std::try_to_lock); alone.owns_lock()) {
      sleep_as_driver(completion);
    } else {
      completion.sleep();
    }
    return leave(!completion.is_pending());
  } catch (...) {
    leave(false);
    throw;
  }
}

void Cycle::hurry() {
  check_usable();
  board_.counters().hurries.fetch_add(1, std::memory_order_seq_cst);
  board_.note_change();
  if (board_.counters(0).lingers.load(std::memory_order_seq_cst) != 0) board_.ring(0);
}

// Makes the calling thread a driver. Afterwards the engine's thread continues.
class Cycle::Driving {
 public:
  explicit Driving(Cycle& cycle) : cycle_(cycle) { drivers().fetch_add(1, std::memory_order_seq_cst); }
  ~Driving() {
    drivers().fetch_sub(1, std::memory_order_seq_cst);
    if (cycle_.has_work()) cycle_.board_.ring(cycle_.local_rank_);
  }
  Driving(const Driving&) = delete;
  Driving& operator=(const Driving&) = delete;

 private:
  std::atomic<uint32_t>& drivers() const { return cycle_.board_.counters().drivers; }
  Cycle& cycle_;
};

// Does steps while the completion may finish soon.
void Cycle::drive(Completion& completion) {
  const Driving driving(*this);
  for (int look = 0; look < spins_ + yields_ && completion.is_pending(); ++look) {
    if (can_step()) {
      const Stepping turn(*this, std::try_to_lock);
      if (turn.is_ours() && do_step(true) == Step::kDid) look = 0;
    }
    look < spins_ ? pause() : static_cast<void>(sched_yield());
  }
}

// Sleeps between steps until the completion is finished, a signal comes or a second has passed.
void Cycle::sleep_as_driver(Completion& completion) {
  constexpr int64_t kSecond = 1'000'000'000;
  const Driving driving(*this);
  completion.ring_at_finish(&drivers_bell_);
  const int64_t until_ns = steady_now_ns() + kSecond;
  bool is_over = false;
  while (!is_over) {
    const uint32_t token = drivers_bell_.prepare(Sleep::kFutex);
    bool has_stepped = false;
    if (completion.is_pending() && can_step()) {
      // Another thread that holds the right to do steps looks for work again afterwards.
      const Stepping turn(*this, std::try_to_lock);
      has_stepped = turn.is_ours();
      if (has_stepped) {
        drivers_bell_.cancel();
        do_step(true);
      }
    }
    if (!completion.is_pending()) {
      drivers_bell_.cancel();
      is_over = true;
    } else if (!has_stepped) {
      const int64_t left_ns = std::max<int64_t>(until_ns - steady_now_ns(), 0);
      is_over = drivers_bell_.sleep_on_futex(token, left_ns) || left_ns == 0;
    }
  }
  completion.ring_at_finish(nullptr);
}

Cycle::Event Cycle::run() {
  const BlockSignals block;
  const BellHandle bell = board_.bell(local_rank_);
  while (true) {
    {
      const Stepping turn(*this);
      Step done = Step::kDid;
      while (done == Step::kDid && !stopping_.load()) done = do_step(false);
      if (done == Step::kNegotiate) return Event::kNegotiate;
    }
    if (stopping_.load()) return Event::kStopped;
    if (failed_.load()) throw *failure();
    const uint32_t token = bell.prepare(Sleep::kFutex);
    const int64_t linger_ns = in_negotiation_.load() ? -1 : leader_.linger_left_ns();
    if (has_work() || stopping_.load() || linger_ns == 0) {
      bell.cancel();
    } else {
      bell.sleep_on_futex(token, linger_ns);
    }
  }
}

void Cycle::stop() {
  stopping_.store(true);
  board_.bell(local_rank_).ring();
}

// --- Steps ---------------------------------------------------------------------------------------------------------

// Whether a step has something to do.
bool Cycle::has_work() const {
  if (failed_.load()) return false;
  if (changed_.load(std::memory_order_seq_cst) || leader_.has_mail()) return true;
  if (in_negotiation_.load()) return negotiation_due_.load();
  return board_.has_entry(taken_.load(std::memory_order_relaxed)) || (leader_.leads() && leader_.has_news());
}

// Does one step, with stepping_ held. `hands_over`: leaves a negotiation round to the engine's thread.
Cycle::Step Cycle::do_step(bool hands_over) {
  if (failed_.load()) return Step::kNothing;
  try {
    if (leader_.has_mail()) leader_.read_mail();
    if (in_negotiation_.load()) {
      if (!hands_over && negotiation_due_.exchange(false)) return Step::kNegotiate;
    } else if (board_.has_entry(taken_.load(std::memory_order_relaxed))) {
      return take_entry(hands_over);
    } else if (leader_.leads() && leader_.check_board()) {
      return Step::kDid;
    }
    // There is nothing to do. Check whether a rank that the next step needs is lost.
    changed_.exchange(false);  // reads the flag, so it sees the state published before; a plain store might not
    if (const auto failure = communicator_.failure()) {
      fail(*failure);
    } else if (!in_negotiation_.load()) {  // in a negotiation round the calls of the engine's thread report it
      if (const auto departed = communicator_.departed()) fail(*departed);
    }
    return Step::kNothing;
  } catch (const Failure& failure) {
    fail(failure);
    return Step::kNothing;
  } catch (const ProtocolError& error) {
    communicator_.watch().distrust(error);
    fail(communicator_.failure().value());
    return Step::kNothing;
  } catch (const std::exception& error) {
    communicator_.abort(std::string("the engine failed: ") + error.what());
    fail(communicator_.failure().value_or(Failure(FailureKind::kAborted, communicator_.rank(), error.what())));
    throw;
  }
}

Cycle::Step Cycle::take_entry(bool hands_over) {
  uint64_t at = taken_.load(std::memory_order_relaxed);
  const uint32_t count = board_.word(at++);
  if (count == kNegotiationEntry) {
    in_negotiation_.store(true);
    recorder_.round_began(at);
    negotiations_begun_.fetch_add(1);
    taken_.store(at);
    if (hands_over) {
      negotiation_due_.store(true);
      board_.bell(local_rank_).ring();
    }
    return hands_over ? Step::kNothing : Step::kNegotiate;
  }
  if (count > slots_.size()) {
    throw ProtocolError(communicator_.leader(), "an entry of the log with more slots than the cache has");
  }
  std::vector<uint32_t> slots(count);
  for (uint32_t& slot : slots) slot = board_.word(at++);
  check_slots(slots, communicator_.leader(), slots_.size());
  taken_.store(at);
  recorder_.decided(slots, [this](uint32_t slot) { return std::string_view(slots_[slot].name); }, at);
  run_slots(slots);
  return Step::kDid;
}

void Cycle::run_slots(const std::vector<uint32_t>& slots) {
  std::vector<Work> batch;
  batch.reserve(slots.size());
  const int contributors = contributors_.load(std::memory_order_relaxed);
  const int64_t now_ns = coarse_now_ns();
  uint64_t ran = 0;
  int64_t waited_ns = 0;
  for (uint32_t index : slots) {
    Slot& slot = slots_[index];
    const bool is_absent = !slot.is_pending();
    if (!is_absent) {
      ++ran;
      waited_ns += slot.completion->begin_running(now_ns);
    }
    for (const Tensor& tensor : slot.tensors) {
      batch.push_back({&tensor.signature, &tensor.rows, tensor.memory.in, tensor.memory.out, index, contributors,
                       is_absent, slot.tensors.size() > 1});
    }
    slot.to_run = slot.tensors.size();
    if (communicator_.rank() == 0) slot.last_use = ++uses_;
    if (meter_.is_on() && meter_.decided(index, slot.bytes)) want_negotiation();
  }
  ran_.store(ran_.load(std::memory_order_relaxed) + ran, std::memory_order_relaxed);
  waited_ns_.store(waited_ns_.load(std::memory_order_relaxed) + waited_ns, std::memory_order_relaxed);
  runner_.run(batch, [&](const Work& work) {
    Slot& slot = slots_[work.slot];
    if (--slot.to_run > 0) return;
    if (work.is_absent) {  // this rank has taken the decision, so the tensor may be decided again
      board_.flip(work.slot);
      board_.note_change();
      board_.ring(0);
      return;
    }
    // A copy keeps it alive: once it is finished, the program may submit the slot's tensor again.
    const std::shared_ptr<Completion> completion = slot.completion;
    if (slot.is_metered) meter_.ended();
    completion->finish(true);
  });
}

std::vector<Cycle::Tensor> Cycle::tensors_of(const Signature& signature, const std::vector<uint64_t>& rows) const {
  std::vector<Tensor> tensors;
  const size_t count = 1 + signature.more.size();
  const auto rows_each = static_cast<ptrdiff_t>(rows.size() / count);
  for (Signature& each : signature.tensors()) {
    const auto begin = rows.begin() + static_cast<ptrdiff_t>(tensors.size()) * rows_each;
    tensors.push_back({std::move(each), {begin, begin + rows_each}, {}});
    const Tensor& tensor = tensors.back();
    check_sent([&] { check_rows(tensor.signature, tensor.rows, communicator_.rank(), communicator_.size()); });
  }
  return tensors;
}

void Cycle::fail(const Failure& failure) {
  {
    std::lock_guard lock(failing_);
    if (!failure_) failure_ = failure;
  }
  failed_.store(true);
  std::lock_guard lock(table_);
  for (Slot& slot : slots_) {
    if (slot.is_pending()) slot.completion->finish(false);
  }
  board_.bell(local_rank_).ring();
}

void Cycle::give_up(const Failure& failure) {
  const Stepping turn(*this);
  fail(failure);
}

std::optional<Failure> Cycle::failure() const {
  std::lock_guard lock(failing_);
  return failure_;
}

// --- Events from the watch -----------------------------------------------------------------------------------------

void Cycle::on_note(int peer, std::span<const uint32_t> words) {
  if (recorder_.on_note(peer, words)) return;
  leader_.on_note(peer, words);
  board_.ring(local_rank_);
}

void Cycle::on_change() {
  changed_.store(true);
  board_.ring(local_rank_);
}

void Cycle::visit_pending(const Pending::Visit& visit) {
  {
    std::lock_guard lock(table_);
    for (const Slot& slot : slots_) {
      if (slot.is_pending()) visit(slot.name, slot.signature.kind, *slot.completion);
    }
  }
  pending_.visit_misses(visit);
}

// --- Negotiation rounds --------------------------------------------------------------------------------------------

void Cycle::want_negotiation() {
  board_.counters().negotiation_wanted.store(negotiations_begun_.load() + 1, std::memory_order_seq_cst);
  board_.note_change();
  board_.ring(0);
}

void Cycle::insert(uint32_t index, std::string name, Signature signature, std::vector<uint64_t> rows) {
  check_sent([&] { check_slots({&index, 1}, 0, slots_.size()); });
  std::vector<Tensor> tensors = tensors_of(signature, rows);
  std::lock_guard lock(table_);
  Slot& slot = slots_.at(index);
  slot = Slot{};
  recorder_.forget_slot(index);
  slot.is_used = true;
  slot.name = std::move(name);
  slot.tensors = std::move(tensors);
  for (const Tensor& tensor : slot.tensors) slot.bytes += tensor.signature.bytes();
  slot.signature = std::move(signature);
  slot_of_[slot.name] = index;
  slots_in_use_ = std::max<size_t>(slots_in_use_, index + 1);
  leader_.include_slot(index);
  if (communicator_.rank() == 0) slot.last_use = ++uses_;
}

std::shared_ptr<Completion> Cycle::evict(uint32_t index) {
  std::lock_guard lock(table_);
  Slot& slot = slots_.at(index);
  std::shared_ptr<Completion> pending = take_back(slot, index);
  slot_of_.erase(slot.name);
  slot = Slot{};
  return pending;
}

std::shared_ptr<Completion> Cycle::take_back(uint32_t index) {
  std::lock_guard lock(table_);
  return take_back(slots_.at(index), index);
}

std::shared_ptr<Completion> Cycle::take_back(Slot& slot, uint32_t index) {
  if (!slot.is_pending()) return nullptr;
  board_.flip(index);  // back to rest: the tensor is no longer submitted
  if (slot.is_metered) meter_.ended();
  return std::move(slot.completion);
}

void Cycle::add_miss(std::string_view name, const Signature& signature, const std::vector<uint64_t>& rows,
                     std::span<const Memory> memory, int contributors, bool is_absent) {
  recorder_.decided_miss(name);
  DecidedMiss run{tensors_of(signature, rows), contributors, is_absent};
  for (size_t i = 0; i < std::min(run.tensors.size(), memory.size()); ++i) run.tensors[i].memory = memory[i];
  decided_misses_.push_back(std::move(run));
}

void Cycle::run_misses() {
  const std::vector<DecidedMiss> runs = std::exchange(decided_misses_, {});
  std::vector<Work> batch;
  for (const DecidedMiss& run : runs) {
    const auto slot = static_cast<uint32_t>(Recorder::kMissSlots + (&run - runs.data()));
    for (const Tensor& tensor : run.tensors) {
      batch.push_back({&tensor.signature, &tensor.rows, tensor.memory.in, tensor.memory.out, slot, run.contributors,
                       run.is_absent, run.tensors.size() > 1});
    }
  }
  const Stepping turn(*this);
  runner_.run(batch, [](const Work&) {});
  recorder_.ran_misses();
}

void Cycle::join() {
  {
    std::lock_guard lock(table_);
    has_joined_ = true;
  }
  pending_.note_submission();
}

void Cycle::absent() { board_.counters().has_joined.store(1, std::memory_order_seq_cst); }

void Cycle::resume() {
  board_.counters().has_joined.store(0, std::memory_order_seq_cst);
  std::lock_guard lock(table_);
  has_joined_ = false;
  runner_.free_neutral();
}

Tunables Cycle::tunables() const {
  return {runner_.fusion_bytes(), leader_.linger_ns(), leader_.batch_bytes(), runner_.largest_fused_bytes(),
          communicator_.switch_over()};
}

void Cycle::tune(const Tunables& values) {
  const Stepping turn(*this);
  runner_.set_fusion(values.fusion_bytes, values.largest_fused_bytes);
  leader_.set_batching(values.linger_ns, values.batch_bytes);
  communicator_.set_switch_over(values.switch_over);
}

void Cycle::begin_negotiation() { negotiations_entered_.fetch_add(1); }

void Cycle::end_negotiation() {
  const Stepping turn(*this);
  recorder_.round_ended();
  in_negotiation_.store(false);
  board_.counters().negotiations_done.store(negotiations_begun_.load(), std::memory_order_seq_cst);
  board_.note_change();
  board_.ring(0);
}

std::vector<uint32_t> Cycle::take_used() {
  const Stepping turn(*this);
  std::vector<uint32_t> used;
  for (uint32_t index = 0; index < slots_in_use_; ++index) {
    if (slots_[index].last_use > 0) used.push_back(index);
  }
  std::sort(used.begin(), used.end(), [&](uint32_t a, uint32_t b) { return slots_[a].last_use < slots_[b].last_use; });
  for (uint32_t index : used) slots_[index].last_use = 0;
  return used;
}

}  // namespace ronde
