#include "engine/leader.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <utility>

namespace ronde {
namespace {

enum class Note : uint32_t {
  kReady = 1,  // to the parent: the number of cold rounds so far, then slots that are ready on all hosts from here down
  kWant = 2,   // to the parent: the number of the cold round that one of these hosts needs
  kEntry = 3,  // to the children: 1 if more follows, then words of an entry of the log
};
constexpr size_t kWordsPerNote = Watch::kNoteWords - 3;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

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
  return until == 0 ? -1 : std::max<int64_t>(until - now_ns(), 0);
}

// What has changed on this host since the last look? True if something could be decided or reported.
bool Leader::look() {
  const uint64_t changes = board_.changes();
  if (changes == seen_.load(std::memory_order_relaxed) && linger_left_ns() != 0) return false;
  seen_.store(changes);
  if (!is_round_wanted()) return decide(false);
  if (!all_are_through()) return false;  // what is ready is not known yet
  // What is ready goes first: the round may be the last, because somebody leaves.
  const bool has_decided = decide(true);
  return want_round() || has_decided;
}

// Whoever is not through with the last cold round may still have set a bit for what the slot held before.
bool Leader::all_are_through() const {
  for (int local = 0; local < board_.size(); ++local) {
    if (board_.counters(local).cold_done.load(std::memory_order_seq_cst) != cold_appended_) return false;
  }
  return true;
}

uint64_t Leader::round_wanted() const {
  uint64_t wanted = cold_asked_;
  for (int local = 0; local < board_.size(); ++local) {
    wanted = std::max(wanted, board_.counters(local).cold_wanted.load(std::memory_order_seq_cst));
  }
  return wanted;
}

bool Leader::want_round() {
  const uint64_t wanted = round_wanted();
  if (decides()) {
    publish({kColdEntry});
    return true;
  }
  if (wanted > cold_reported_) {
    cold_reported_ = wanted;
    const uint32_t note[] = {static_cast<uint32_t>(Note::kWant), static_cast<uint32_t>(wanted)};
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

// Something is ready. Does it run at once, or is there time to wait for more? Between hosts all is urgent: who waits on
// another host is not seen here.
bool Leader::is_urgent() {
  const uint64_t hurries = board_.hurries();
  const bool is_hurried = std::exchange(hurries_seen_, hurries) != hurries;
  const int64_t left_ns = linger_left_ns();
  if (has_other_hosts_ || linger_ns_ == 0 || left_ns == 0 || is_hurried || board_.somebody_waits() ||
      board_.counters(0).ready_bytes.load(std::memory_order_seq_cst) >= batch_bytes()) {
    return true;
  }
  if (left_ns < 0) {
    linger_until_.store(now_ns() + linger_ns_);
    board_.counters(0).lingers.store(1, std::memory_order_seq_cst);
    seen_.store(UINT64_MAX);  // look once more: who came before that has not rung
  }
  return false;
}

void Leader::stop_lingering() {
  if (linger_until_.exchange(0) == 0) return;
  board_.counters(0).lingers.store(0, std::memory_order_seq_cst);
}

// The slots that are ready on this host and all under it; for a leader other than rank 0 those not reported yet.
std::vector<uint32_t> Leader::ready_slots() const {
  std::vector<uint32_t> slots;
  if (!all_are_through()) return slots;
  for (size_t word = 0; word < board_.words(); ++word) {
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
  for (size_t begin = 0; begin < slots.size(); begin += kWordsPerNote) {
    std::vector<uint32_t> note{static_cast<uint32_t>(Note::kReady), static_cast<uint32_t>(cold_appended_)};
    note.insert(note.end(), slots.begin() + static_cast<ptrdiff_t>(begin),
                slots.begin() + static_cast<ptrdiff_t>(std::min(begin + kWordsPerNote, slots.size())));
    send_up(note);
  }
}

// The next entry of the log, here and on the hosts under this one.
void Leader::publish(const std::vector<uint32_t>& entry) {
  for (int child : children_) {
    for (size_t begin = 0; begin < entry.size(); begin += kWordsPerNote) {
      const size_t end = std::min(begin + kWordsPerNote, entry.size());
      std::vector<uint32_t> note{static_cast<uint32_t>(Note::kEntry), end < entry.size() ? 1u : 0u};
      note.insert(note.end(), entry.begin() + static_cast<ptrdiff_t>(begin),
                  entry.begin() + static_cast<ptrdiff_t>(end));
      communicator_.watch().send_note(child, note);
    }
  }
  append(entry);
}

void Leader::append(const std::vector<uint32_t>& entry) {
  if (entry.front() == kColdEntry) {
    ++cold_appended_;
    // Slots may change now: who is ready must say so again.
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

void Leader::hear_ready(int peer, std::span<const uint32_t> slots) {
  const auto child = std::find(children_.begin(), children_.end(), peer);
  if (child == children_.end()) return;
  auto& ready = ready_under_[static_cast<size_t>(child - children_.begin())];
  for (uint32_t slot : slots) {
    if (slot < capacity_) ready[slot / 64] |= uint64_t{1} << (slot % 64);
  }
}

void Leader::read_mail() {
  std::vector<Mail> mail;
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
        hear_ready(peer, payload);
        break;
      case Note::kWant:
        cold_asked_ = std::max<uint64_t>(cold_asked_, words[1]);
        break;
      case Note::kEntry:
        arriving_.insert(arriving_.end(), payload.begin(), payload.end());
        if (words[1] == 0) {
          publish(arriving_);
          arriving_.clear();
        }
        break;
    }
  }
  seen_.store(UINT64_MAX);  // look again
}

void Leader::on_note(int peer, std::span<const uint32_t> words) {
  if (words.size() < 2) return;
  std::lock_guard lock(mailing_);
  mail_.push_back({peer, {words.begin(), words.end()}});
  has_mail_.store(true);
}

}  // namespace ronde
