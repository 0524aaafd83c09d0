#include "engine/leader.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "base/steady_clock.h"
#include "engine/tree.h"

namespace ronde {
namespace {

template <class Each>
void for_each_bit(uint64_t word, size_t index, Each&& each) {
  for (; word != 0; word &= word - 1) {
    each(static_cast<uint32_t>(index * 64 + static_cast<size_t>(std::countr_zero(word))));
  }
}

}  // namespace

Leader::Leader(Communicator& communicator, const Board& board, size_t capacity, int64_t linger_ns, size_t arity)
    : communicator_(communicator),
      board_(board),
      capacity_(capacity),
      linger_ns_(linger_ns),
      leads_(communicator.local_rank() == 0),
      has_other_hosts_(communicator.ranks_of_host().size() > 1),
      rest_(board.words()),
      reported_(board.words()) {
  if (!leads_) return;
  const auto& ranks_of_host = communicator.ranks_of_host();
  const Tree tree{ranks_of_host.size(), arity};
  const auto host = static_cast<size_t>(communicator.host_of()[communicator.rank()]);
  if (host > 0) parent_ = ranks_of_host[tree.parent(host)].front();
  for (size_t child = 0; child < tree.child_count(host); ++child) {
    children_.push_back(ranks_of_host[tree.first_child(host) + child].front());
  }
  ready_under_.assign(children_.size(), std::vector<uint64_t>(board.words()));
}

void Leader::set_batching(int64_t linger_ns, uint64_t batch_bytes) {
  linger_ns_ = linger_ns;
  batch_bytes_.store(batch_bytes, std::memory_order_relaxed);
}

int64_t Leader::linger_left_ns() const {
  const int64_t until = linger_until_.load();
  return until == 0 ? -1 : std::max<int64_t>(until - steady_now_ns(), 0);
}

bool Leader::check_board() {
  const uint64_t changes = board_.changes();
  if (changes == seen_.load(std::memory_order_relaxed) && linger_left_ns() != 0) return false;
  seen_.store(changes);
  if (!is_round_wanted()) return decide(false);
  if (!all_ranks_finished_round()) return false;  // the bits do not show yet which tensors are ready
  // Ready tensors go first: if a rank leaves, this round is the last.
  const bool has_decided = decide(true);
  return request_round() || has_decided;
}

// A rank that has not finished the last negotiation round may still have flipped a bit for the slot's previous tensor.
bool Leader::all_ranks_finished_round() const {
  for (int local = 0; local < board_.size(); ++local) {
    if (board_.counters(local).negotiations_done.load(std::memory_order_seq_cst) != negotiations_appended_)
      return false;
  }
  return true;
}

uint64_t Leader::round_wanted() const {
  uint64_t wanted = negotiation_asked_;
  for (int local = 0; local < board_.size(); ++local) {
    wanted = std::max(wanted, board_.counters(local).negotiation_wanted.load(std::memory_order_seq_cst));
  }
  return wanted;
}

bool Leader::request_round() {
  const uint64_t wanted = round_wanted();
  if (decides()) {
    publish({kNegotiationEntry});
    return true;
  }
  if (wanted > negotiation_reported_) {
    negotiation_reported_ = wanted;
    const uint32_t note[] = {static_cast<uint32_t>(LeaderNote::Type::kWant), static_cast<uint32_t>(wanted)};
    send_up(note);
  }
  return false;
}

bool Leader::decide(bool at_once) {
  const std::vector<uint32_t> slots = ready_slots();
  if (slots.empty()) {
    stop_lingering();
    return false;
  }
  if (!is_urgent() && !at_once) return false;
  stop_lingering();
  board_.counters(0).ready_bytes.store(0, std::memory_order_seq_cst);
  if (!decides()) {
    report(slots);
    return false;
  }
  std::vector<uint32_t> entry{static_cast<uint32_t>(slots.size())};
  entry.insert(entry.end(), slots.begin(), slots.end());
  publish(entry);
  return true;
}

// Whether ready tensors run at once instead of waiting for more. Between hosts everything is urgent, because the board
// does not show the waiting threads of other hosts.
bool Leader::is_urgent() {
  const uint64_t hurries = board_.hurries();
  const bool is_hurried = std::exchange(hurries_seen_, hurries) != hurries;
  const int64_t left_ns = linger_left_ns();
  if (has_other_hosts_ || linger_ns_ == 0 || left_ns == 0 || is_hurried || board_.any_thread_waits() ||
      board_.counters(0).ready_bytes.load(std::memory_order_seq_cst) >= batch_bytes()) {
    return true;
  }
  if (left_ns < 0) {
    linger_until_.store(steady_now_ns() + linger_ns_);
    board_.counters(0).lingers.store(1, std::memory_order_seq_cst);
    seen_.store(UINT64_MAX);  // check once more: a rank that came before `lingers` was set has not rung
  }
  return false;
}

void Leader::stop_lingering() {
  if (linger_until_.exchange(0) == 0) return;
  board_.counters(0).lingers.store(0, std::memory_order_seq_cst);
}

// The slots that are ready on this host and on all hosts below it; for a leader other than rank 0 only unreported ones.
std::vector<uint32_t> Leader::ready_slots() const {
  std::vector<uint32_t> slots;
  if (!all_ranks_finished_round()) return slots;
  const size_t words = words_in_use_.load();
  for (size_t word = 0; word < words; ++word) {
    uint64_t ready = UINT64_MAX;
    for (int local = 0; local < board_.size() && ready != 0; ++local) {
      const uint64_t flipped = board_.bits(local)[word].load(std::memory_order_seq_cst) ^ rest_[word];
      ready &= board_.counters(local).has_joined.load(std::memory_order_relaxed) != 0 ? ~flipped : flipped;
    }
    for (size_t child = 0; child < children_.size() && ready != 0; ++child) ready &= ready_under_[child][word];
    if (!decides()) ready &= ~reported_[word];
    for_each_bit(ready, word, [&](uint32_t slot) {
      if (slot < capacity_) slots.push_back(slot);
    });
  }
  return slots;
}

void Leader::report(const std::vector<uint32_t>& slots) {
  for (uint32_t slot : slots) reported_[slot / 64] |= uint64_t{1} << (slot % 64);
  for (size_t begin = 0; begin < slots.size(); begin += LeaderNote::kWords) {
    std::vector<uint32_t> note{static_cast<uint32_t>(LeaderNote::Type::kReady),
                               static_cast<uint32_t>(negotiations_appended_)};
    note.insert(note.end(), slots.begin() + static_cast<ptrdiff_t>(begin),
                slots.begin() + static_cast<ptrdiff_t>(std::min(begin + LeaderNote::kWords, slots.size())));
    send_up(note);
  }
}

// Appends an entry to the log, here and on the hosts below this one.
void Leader::publish(const std::vector<uint32_t>& entry) {
  for (int child : children_) {
    for (size_t begin = 0; begin < entry.size(); begin += LeaderNote::kWords) {
      const size_t end = std::min(begin + LeaderNote::kWords, entry.size());
      std::vector<uint32_t> note{static_cast<uint32_t>(LeaderNote::Type::kEntry), end < entry.size() ? 1u : 0u};
      note.insert(note.end(), entry.begin() + static_cast<ptrdiff_t>(begin),
                  entry.begin() + static_cast<ptrdiff_t>(end));
      communicator_.watch().send_note(child, note);
    }
  }
  append(entry);
}

void Leader::append(const std::vector<uint32_t>& entry) {
  if (entry.front() == kNegotiationEntry) {
    ++negotiations_appended_;
    // Slots may change now, so children must report readiness again.
    std::fill(reported_.begin(), reported_.end(), 0);
    for (auto& words : ready_under_) std::fill(words.begin(), words.end(), 0);
  } else {
    for (size_t i = 1; i < entry.size(); ++i) {
      const uint64_t mask = uint64_t{1} << (entry[i] % 64);
      rest_[entry[i] / 64] ^= mask;
      reported_[entry[i] / 64] &= ~mask;
      for (auto& words : ready_under_) words[entry[i] / 64] &= ~mask;
    }
  }
  board_.append(entry);
  for (int local = 1; local < board_.size(); ++local) board_.ring(local);
}

void Leader::read_mail() {
  std::vector<Mail> mail;
  {
    std::lock_guard lock(mailing_);
    mail.swap(mail_);
    has_mail_.store(false);
  }
  for (const auto& [peer, note] : mail) handle_note(peer, note);
  seen_.store(UINT64_MAX);  // makes check_board() check again
}

void Leader::handle_note(int peer, const LeaderNote& note) {
  switch (note.type) {
    case LeaderNote::Type::kReady:
      return on_ready(peer, note);
    case LeaderNote::Type::kWant:
      return on_want(peer, note);
    case LeaderNote::Type::kEntry:
      return on_entry(peer, note);
  }
}

size_t Leader::child_of(int peer) const {
  const auto child = std::find(children_.begin(), children_.end(), peer);
  if (child == children_.end()) throw ProtocolError(peer, "a leader's note to its parent, which this rank is not");
  return static_cast<size_t>(child - children_.begin());
}

void Leader::on_ready(int peer, const LeaderNote& note) {
  auto& ready = ready_under_[child_of(peer)];
  if (note.number > negotiations_appended_)
    throw ProtocolError(peer, "a report for a negotiation round that has not begun");
  if (note.number < negotiations_appended_) return;  // sent before the last negotiation round
  for (const uint32_t slot : note.words) ready[slot / 64] |= uint64_t{1} << (slot % 64);
}

void Leader::on_want(int peer, const LeaderNote& note) {
  child_of(peer);
  if (note.number > negotiations_appended_ + 1)
    throw ProtocolError(peer, "a request for a negotiation round after the next");
  negotiation_asked_ = std::max<uint64_t>(negotiation_asked_, note.number);
}

void Leader::on_entry(int peer, const LeaderNote& note) {
  if (peer != parent_) throw ProtocolError(peer, "an entry of the log although it is not the parent of this rank");
  arriving_.insert(arriving_.end(), note.words.begin(), note.words.end());
  if (arriving_.size() > capacity_ + 1) {
    throw ProtocolError(peer, "an entry of the log with more slots than the cache has");
  }
  if (note.number != 0) return;
  check_entry(arriving_, peer, capacity_);
  for (size_t i = 1; i < arriving_.size(); ++i) {
    const uint32_t slot = arriving_[i];
    if ((reported_[slot / 64] >> (slot % 64) & 1) == 0) {
      throw ProtocolError(peer, "an entry that runs slot " + std::to_string(slot) + ", which is not ready here");
    }
  }
  publish(arriving_);
  arriving_.clear();
}

void Leader::on_note(int peer, std::span<const uint32_t> words) {
  if (!leads_) throw ProtocolError(peer, "a leader's note to a rank that is not a leader");
  LeaderNote note = LeaderNote::parse(words, peer, capacity_);
  std::lock_guard lock(mailing_);
  mail_.push_back({peer, std::move(note)});
  has_mail_.store(true);
}

}  // namespace ronde
