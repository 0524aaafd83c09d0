#include "engine/cycle.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "block_signals.h"

namespace ronde {
namespace {

enum class Note : uint32_t {
  kReady = 1,  // leader to rank 0: the number of cold rounds so far, then slots that are ready on its host
  kWant = 2,   // leader to rank 0: the number of the cold round that its host needs
  kEntry = 3,  // rank 0 to leader: 1 if more follows, then words of an entry of the log
};
constexpr size_t kWordsPerNote = Watch::kNoteWords - 3;

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(CPU_COUNT(&set), 1) : 1;
}

std::vector<std::byte*> parts_of(const Communicator& communicator, std::byte* own, size_t bytes) {
  const Place place = communicator.symmetric()->place_of(own, bytes);
  if (place.segment == 0) throw UsageError("the engine needs symmetric memory");
  std::vector<std::byte*> parts;
  for (int local = 0; local < communicator.local_size(); ++local) {
    parts.push_back(communicator.symmetric()->resolve(place, local));
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

template <class Each>
void for_each_bit(uint64_t word, size_t index, Each&& each) {
  for (; word != 0; word &= word - 1)
    each(static_cast<uint32_t>(index * 64 + static_cast<size_t>(std::countr_zero(word))));
}

}  // namespace

Cycle::Cycle(Communicator& communicator, std::byte* board, size_t capacity, std::byte* buffer, size_t buffer_bytes)
    : communicator_(communicator),
      local_rank_(communicator.local_rank()),
      board_(parts_of(communicator, board, Board::bytes(capacity)), communicator.local_rank(), capacity),
      runner_(communicator, buffer, buffer_bytes),
      slots_(capacity),
      rest_(board_.words()),
      reported_(board_.words()) {
  for (const auto& ranks : communicator.ranks_of_host()) leaders_.push_back(ranks.front());
  ready_on_.assign(leaders_.size(), std::vector<uint64_t>(board_.words()));
  const bool crowded = communicator.local_size() > usable_cores();
  spins_ = crowded ? 16 : 400;
  yields_ = crowded ? 16 : 100;
  communicator_.watch().set_listener(this);
}

Cycle::~Cycle() { communicator_.watch().set_listener(nullptr); }

// --- Submitting and waiting ----------------------------------------------------------------------------------------

Cycle::Submitted Cycle::submit(std::string_view name, const Signature& signature, const void* in, void* out,
                               bool waits) {
  if (failed_.load()) throw *failure();
  std::shared_ptr<Completion> completion;
  uint32_t index = 0;
  {
    std::lock_guard lock(table_);
    const auto found = slot_of_.find(name);
    if (found == slot_of_.end()) return {Answer::kMiss, 0, nullptr};
    index = found->second;
    Slot& slot = slots_[index];
    if (slot.completion && slot.completion->is_pending()) return {Answer::kInFlight, 0, nullptr};
    if (slot.signature != signature) return {Answer::kMiss, 0, nullptr};
    completion = slot.completion = std::make_shared<Completion>();
    slot.in = in;
    slot.out = out;
    const bool is_ready = board_.flip(index);
    board_.note_change();
    // Who is about to wait looks at the board itself, and the leader's other threads need not.
    if (is_ready && !(waits && is_leader())) board_.ring(0);
  }
  if (failed_.load()) completion->finish(false);  // it came too late to be failed with the others
  return {Answer::kHit, index, std::move(completion)};
}

bool Cycle::wait(Completion& completion) {
  if (!completion.is_pending()) return true;
  drive(completion);
  return !completion.is_pending() || completion.sleep();
}

// Does steps as long as it may be over soon. After that the engine's thread goes on.
void Cycle::drive(Completion& completion) {
  std::atomic<uint32_t>& drivers = board_.counters().drivers;
  drivers.fetch_add(1, std::memory_order_seq_cst);
  const auto leave = [&] {
    drivers.fetch_sub(1, std::memory_order_seq_cst);
    if (has_work()) board_.ring(local_rank_);
  };
  try {
    for (int look = 0; look < spins_ + yields_ && completion.is_pending(); ++look) {
      if (!in_cold_.load() && has_work()) {
        std::unique_lock lock(stepping_, std::try_to_lock);
        if (lock.owns_lock() && step(true) == Step::kDid) look = 0;
      }
      look < spins_ ? pause() : static_cast<void>(sched_yield());
    }
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

Cycle::Event Cycle::run() {
  const BlockSignals block;
  const BellRope bell = board_.bell(local_rank_);
  while (true) {
    {
      std::lock_guard lock(stepping_);
      Step done = Step::kDid;
      while (done == Step::kDid && !stopping_.load()) done = step(false);
      if (done == Step::kCold) return Event::kCold;
    }
    if (stopping_.load()) return Event::kStopped;
    if (failed_.load()) throw *failure();
    const uint32_t token = bell.prepare(Sleep::kFutex);
    if (has_work() || stopping_.load()) {
      bell.cancel();
    } else {
      bell.sleep_on_futex(token, -1);
    }
  }
}

void Cycle::stop() {
  stopping_.store(true);
  board_.bell(local_rank_).ring();
}

// --- Steps ---------------------------------------------------------------------------------------------------------

// Whether a step would find something to do.
bool Cycle::has_work() const {
  if (failed_.load()) return false;
  if (changed_.load(std::memory_order_relaxed) || has_mail_.load()) return true;
  if (in_cold_.load()) return cold_due_.load();
  return board_.has_entry(taken_.load(std::memory_order_relaxed)) || (is_leader() && board_.changes() != seen_.load());
}

// One step, with stepping_ held. `hands_over`: a cold round is left to the engine's thread.
Cycle::Step Cycle::step(bool hands_over) {
  if (failed_.load()) return Step::kNothing;
  try {
    if (has_mail_.load()) read_mail();
    if (in_cold_.load()) {
      if (!hands_over && cold_due_.exchange(false)) return Step::kCold;
    } else if (board_.has_entry(taken_.load(std::memory_order_relaxed))) {
      return take_entry(hands_over);
    } else if (is_leader() && look()) {
      return Step::kDid;
    }
    // Nothing to do. Has somebody fallen out who would be needed next?
    changed_.store(false);
    if (const auto failure = communicator_.failure()) {
      fail(*failure);
    } else if (const auto departed = communicator_.departed(); departed && !in_cold_.load()) {
      fail(*departed);
    }
    return Step::kNothing;
  } catch (const Failure& failure) {
    fail(failure);
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
  if (count == kColdEntry) {
    in_cold_.store(true);
    cold_begun_.fetch_add(1);
    taken_.store(at);
    if (hands_over) {
      cold_due_.store(true);
      board_.bell(local_rank_).ring();
    }
    return hands_over ? Step::kNothing : Step::kCold;
  }
  std::vector<uint32_t> slots(count);
  for (uint32_t& slot : slots) slot = board_.word(at++);
  taken_.store(at);
  run_slots(slots);
  return Step::kDid;
}

void Cycle::run_slots(const std::vector<uint32_t>& slots) {
  std::vector<Work> batch;
  batch.reserve(slots.size());
  for (uint32_t index : slots) {
    Slot& slot = slots_[index];
    batch.push_back({&slot.signature, &slot.rows, slot.in, slot.out, index});
    if (communicator_.rank() == 0) slot.last_use = ++uses_;
  }
  runner_.run(batch, [&](const Work& work) {
    // Kept alive: once it is finished, its owner may submit the slot's tensor again.
    const std::shared_ptr<Completion> completion = slots_[work.slot].completion;
    completion->finish(true);
  });
}

void Cycle::fail(const Failure& failure) {
  {
    std::lock_guard lock(failing_);
    if (!failure_) failure_ = failure;
  }
  failed_.store(true);
  std::lock_guard lock(table_);
  for (Slot& slot : slots_) {
    if (slot.completion && slot.completion->is_pending()) slot.completion->finish(false);
  }
  board_.bell(local_rank_).ring();
}

std::optional<Failure> Cycle::failure() const {
  std::lock_guard lock(failing_);
  return failure_;
}

// --- The leader ----------------------------------------------------------------------------------------------------

// What has changed on this host since the last look? True if something could be decided or reported.
bool Cycle::look() {
  const uint64_t changes = board_.changes();
  if (changes == seen_.load(std::memory_order_relaxed)) return false;
  seen_.store(changes);
  return want_round() || decide();
}

bool Cycle::want_round() {
  uint64_t wanted = cold_asked_;
  for (int local = 0; local < board_.size(); ++local) {
    wanted = std::max(wanted, board_.counters(local).cold_wanted.load(std::memory_order_seq_cst));
  }
  if (wanted <= cold_appended_) return false;
  if (decides()) {
    publish({kColdEntry});
    return true;
  }
  if (wanted > cold_reported_) {
    cold_reported_ = wanted;
    const uint32_t note[] = {static_cast<uint32_t>(Note::kWant), static_cast<uint32_t>(wanted)};
    communicator_.watch().send_note(0, note);
  }
  return false;
}

bool Cycle::decide() {
  const std::vector<uint32_t> slots = ready_slots();
  if (slots.empty()) return false;
  if (!decides()) {
    report(slots);
    return false;
  }
  std::vector<uint32_t> entry{static_cast<uint32_t>(slots.size())};
  entry.insert(entry.end(), slots.begin(), slots.end());
  publish(entry);
  return true;
}

// The slots that are ready: for rank 0 on all hosts, for another leader on its host and not reported yet.
std::vector<uint32_t> Cycle::ready_slots() {
  std::vector<uint32_t> slots;
  for (int local = 0; local < board_.size(); ++local) {
    // Whoever is not through yet may still have set a bit for what the slot held before.
    if (board_.counters(local).cold_done.load(std::memory_order_seq_cst) != cold_appended_) return slots;
  }
  for (size_t word = 0; word < board_.words(); ++word) {
    uint64_t ready = UINT64_MAX;
    for (int local = 0; local < board_.size() && ready != 0; ++local) {
      ready &= board_.bits(local)[word].load(std::memory_order_seq_cst) ^ rest_[word];
    }
    if (!decides()) {
      ready &= ~reported_[word];
    } else {
      for (size_t host = 1; host < leaders_.size() && ready != 0; ++host) ready &= ready_on_[host][word];
    }
    for_each_bit(ready, word, [&](uint32_t slot) { slots.push_back(slot); });
  }
  return slots;
}

void Cycle::report(const std::vector<uint32_t>& slots) {
  for (uint32_t slot : slots) reported_[slot / 64] |= uint64_t{1} << (slot % 64);
  for (size_t begin = 0; begin < slots.size(); begin += kWordsPerNote) {
    std::vector<uint32_t> note{static_cast<uint32_t>(Note::kReady), static_cast<uint32_t>(cold_appended_)};
    note.insert(note.end(), slots.begin() + static_cast<ptrdiff_t>(begin),
                slots.begin() + static_cast<ptrdiff_t>(std::min(begin + kWordsPerNote, slots.size())));
    communicator_.watch().send_note(0, note);
  }
}

// Rank 0: the next entry of the log, here and on the other hosts.
void Cycle::publish(const std::vector<uint32_t>& entry) {
  for (size_t host = 1; host < leaders_.size(); ++host) {
    for (size_t begin = 0; begin < entry.size(); begin += kWordsPerNote) {
      const size_t end = std::min(begin + kWordsPerNote, entry.size());
      std::vector<uint32_t> note{static_cast<uint32_t>(Note::kEntry), end < entry.size() ? 1u : 0u};
      note.insert(note.end(), entry.begin() + static_cast<ptrdiff_t>(begin),
                  entry.begin() + static_cast<ptrdiff_t>(end));
      communicator_.watch().send_note(leaders_[host], note);
    }
  }
  append(entry);
}

void Cycle::append(const std::vector<uint32_t>& entry) {
  if (entry.front() == kColdEntry) {
    ++cold_appended_;
    // Slots may change now: who is ready must say so again.
    std::fill(reported_.begin(), reported_.end(), 0);
    for (auto& words : ready_on_) std::fill(words.begin(), words.end(), 0);
  } else {
    for (size_t i = 1; i < entry.size(); ++i) {
      const uint64_t mask = uint64_t{1} << (entry[i] % 64);
      rest_[entry[i] / 64] ^= mask;
      reported_[entry[i] / 64] &= ~mask;
      for (auto& words : ready_on_) words[entry[i] / 64] &= ~mask;
    }
  }
  board_.append(entry);
  for (int local = 1; local < board_.size(); ++local) board_.ring(local);
}

// --- News from other hosts, and from the watch ---------------------------------------------------------------------

void Cycle::on_note(int peer, std::span<const uint32_t> words) {
  if (words.size() < 2) return;
  {
    std::lock_guard lock(mailing_);
    mail_.push_back({peer, {words.begin(), words.end()}});
    has_mail_.store(true);
  }
  board_.ring(local_rank_);
}

void Cycle::on_change() {
  changed_.store(true);
  board_.ring(local_rank_);
}

void Cycle::read_mail() {
  std::deque<Mail> mail;
  {
    std::lock_guard lock(mailing_);
    mail.swap(mail_);
    has_mail_.store(false);
  }
  for (const auto& [peer, words] : mail) {
    const auto payload = std::span(words).subspan(2);
    switch (static_cast<Note>(words[0])) {
      case Note::kReady:
        if (words[1] != static_cast<uint32_t>(cold_appended_)) break;  // from before the last cold round
        for (uint32_t slot : payload) {
          if (slot < slots_.size()) {
            ready_on_[communicator_.host_of()[peer]][slot / 64] |= uint64_t{1} << (slot % 64);
          }
        }
        break;
      case Note::kWant:
        cold_asked_ = std::max<uint64_t>(cold_asked_, words[1]);
        break;
      case Note::kEntry:
        arriving_.insert(arriving_.end(), payload.begin(), payload.end());
        if (words[1] == 0) {
          append(arriving_);
          arriving_.clear();
        }
        break;
    }
  }
  seen_.store(UINT64_MAX);  // look again
}

// --- Cold rounds ---------------------------------------------------------------------------------------------------

void Cycle::want_cold() {
  board_.counters().cold_wanted.store(cold_begun_.load() + 1, std::memory_order_seq_cst);
  board_.note_change();
  board_.ring(0);
}

void Cycle::insert(uint32_t index, std::string name, Signature signature, std::vector<uint64_t> rows) {
  std::lock_guard lock(table_);
  Slot& slot = slots_.at(index);
  slot = Slot{};
  slot.is_used = true;
  slot.name = std::move(name);
  slot.signature = std::move(signature);
  slot.rows = std::move(rows);
  slot_of_[slot.name] = index;
  if (communicator_.rank() == 0) slot.last_use = ++uses_;
}

std::shared_ptr<Completion> Cycle::evict(uint32_t index) {
  std::lock_guard lock(table_);
  Slot& slot = slots_.at(index);
  std::shared_ptr<Completion> pending;
  if (slot.completion && slot.completion->is_pending()) {
    pending = std::move(slot.completion);
    board_.flip(index);  // back to rest: it is not submitted any more
  }
  slot_of_.erase(slot.name);
  slot = Slot{};
  return pending;
}

void Cycle::run_now(const Signature& signature, const std::vector<uint64_t>& rows, const void* in, void* out) {
  std::lock_guard lock(stepping_);
  runner_.run_one({&signature, &rows, in, out, 0});
}

void Cycle::end_cold() {
  std::lock_guard lock(stepping_);
  in_cold_.store(false);
  board_.counters().cold_done.store(cold_begun_.load(), std::memory_order_seq_cst);
  board_.note_change();
  board_.ring(0);
}

std::vector<uint32_t> Cycle::take_used() {
  std::lock_guard lock(stepping_);
  std::vector<uint32_t> used;
  for (uint32_t index = 0; index < slots_.size(); ++index) {
    if (slots_[index].last_use > 0) used.push_back(index);
  }
  std::sort(used.begin(), used.end(), [&](uint32_t a, uint32_t b) { return slots_[a].last_use < slots_[b].last_use; });
  for (uint32_t index : used) slots_[index].last_use = 0;
  return used;
}

}  // namespace ronde
