#include "waiting/stalls.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <unordered_set>
#include <utility>

#include "base/steady_clock.h"

namespace ronde {
namespace {

enum class Note : uint32_t {
  kQuestion = 1,   // inquiry, 1 if more notes follow, Question, then ids
  kAnswer = 2,     // inquiry, Answer, then a bit per id, then text
  kAskStacks = 3,  // inquiry
  kStacks = 4,     // inquiry, 1 if more notes follow, 1 if raw, bytes, then text
};

// The words of an answer before its bits.
struct Answer {
  uint32_t ids = 0;
  uint32_t is_in_negotiation = 0;
  uint64_t text_bytes = 0;
  uint64_t calls = 0;
  Waits::Arrivals arrivals{};
  StallHub::Blocked blocked{};
};
constexpr size_t kAnswerWords = sizeof(Answer) / sizeof(uint32_t);
constexpr size_t kIdsPerNote = (Watch::kNoteWords - 4) / 2;
constexpr size_t kBytesPerNote = (Watch::kNoteWords - 5) * sizeof(uint32_t);
constexpr size_t kMostTextBytes = 64 * 1024;
constexpr uint32_t kSurvey = 0x80000000;             // a bit in the numbers of surveys, not of inquiries
constexpr int64_t kInterpreterTimeNs = 300'000'000;  // far more than a healthy interpreter needs for its stacks

}  // namespace

Stalls::Stalls(Communicator& communicator, std::unique_ptr<Waits> waits, std::shared_ptr<StallHub> hub,
               const std::string& label)
    : communicator_(communicator),
      waits_(std::move(waits)),
      hub_(std::move(hub)),
      member_(hub_->join(label, waits_.get())) {
  static_assert(2 + kAnswerWords + (kMostIds + 31) / 32 <= Watch::kNoteWords);
  waits_->on_wake([hub = hub_.get()] { hub->wake(); });
  communicator_.watch().set_listener(this, Watch::Channel::kStalls);
}

void Stalls::close() {
  if (is_abandoned_ || std::exchange(is_closed_, true)) return;
  waits_->disarm();
  hub_->leave(member_);
  communicator_.watch().set_listener(nullptr, Watch::Channel::kStalls);
}

// --- For the inspecting thread -------------------------------------------------------------------------------------

Stalls::FoundWaits Stalls::find_waits(int64_t before_ns, std::span<const uint64_t> ids) {
  FoundWaits found;
  const std::unordered_set<uint64_t> wanted(ids.begin(), ids.end());
  waits_->arm();
  waits_->visit([&](const Waits::Item& item) {
    if (item.since_ns <= before_ns || wanted.contains(item.id)) {
      found.items.push_back(item);
    } else if (found.next_ns < 0 || item.since_ns < found.next_ns) {
      found.next_ns = item.since_ns;
    }
  });
  if (found.next_ns >= 0) waits_->disarm();
  std::stable_sort(found.items.begin(), found.items.end(),
                   [](const Waits::Item& a, const Waits::Item& b) { return a.since_ns < b.since_ns; });
  return found;
}

void Stalls::push(Event event) {
  event.member = member_;
  hub_->push(std::move(event));
}

void Stalls::ask(uint32_t inquiry, std::span<const uint64_t> ids, bool leads_to_report) {
  ask(inquiry, ids, leads_to_report ? Question::kReports : Question::kSilent);
}

void Stalls::ask_about(uint32_t inquiry, std::span<const StallHub::Blocked> blocked) {
  std::vector<uint64_t> ids;
  for (const StallHub::Blocked& each : blocked) ids.insert(ids.end(), {each.where, each.id});
  ask(inquiry, ids, Question::kProcess);
}

void Stalls::ask(uint32_t inquiry, std::span<const uint64_t> ids, Question question) {
  ids = ids.first(std::min(ids.size(), kMostIds));
  const auto own = answer(inquiry, ids, question);
  for (int rank = 0; rank < communicator_.size(); ++rank) {
    if (rank == communicator_.rank()) continue;
    size_t begin = 0;
    do {
      const auto part = ids.subspan(begin, std::min(kIdsPerNote, ids.size() - begin));
      begin += part.size();
      std::vector<uint32_t> words{static_cast<uint32_t>(Note::kQuestion), inquiry, begin < ids.size() ? 1u : 0u,
                                  static_cast<uint32_t>(question)};
      for (const uint64_t id : part) {
        words.push_back(static_cast<uint32_t>(id));
        words.push_back(static_cast<uint32_t>(id >> 32));
      }
      send(rank, words);
    } while (begin < ids.size());
  }
  on_answer(communicator_.rank(), own);
}

void Stalls::ask_for_stacks(uint32_t inquiry, int rank) {
  const uint32_t words[] = {static_cast<uint32_t>(Note::kAskStacks), inquiry};
  send(rank, words);
}

void Stalls::answer_stacks(uint32_t inquiry, int rank, const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    const size_t before = wants_.size();
    std::erase_if(wants_, [&](const Want& want) { return want.rank == rank && want.inquiry == inquiry; });
    if (wants_.size() == before) return;  // too late: the watch's thread has taken the stacks
  }
  send_stacks(rank, inquiry, text, false);
}

std::vector<std::optional<Waits::Arrivals>> Stalls::survey(int64_t timeout_ns) {
  Answers answers(static_cast<size_t>(communicator_.size()));
  uint32_t number = 0;
  {
    std::lock_guard lock(mutex_);
    number = kSurvey | ++surveys_;
    surveyed_[number] = &answers;
  }
  ask(number, {}, Question::kSilent);
  std::unique_lock lock(mutex_);
  answered_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] {
    return communicator_.has_failed() ||
           std::all_of(answers.begin(), answers.end(), [](const auto& each) { return each.has_value(); });
  });
  surveyed_.erase(number);
  return answers;
}

// --- For the other ranks, on the watch's thread --------------------------------------------------------------------

void Stalls::send(int rank, std::span<const uint32_t> words) {
  communicator_.watch().send_note(rank, words, Watch::Channel::kStalls);
}

void Stalls::on_note(int peer, std::span<const uint32_t> words) {
  if (words.size() < 2) {
    throw ProtocolError(peer, "a note about stalls of " + std::to_string(words.size()) + " words");
  }
  switch (static_cast<Note>(words[0])) {
    case Note::kQuestion:
      return on_question(peer, words);
    case Note::kAnswer:
      return on_answer(peer, words);
    case Note::kAskStacks: {
      {
        std::lock_guard lock(mutex_);
        wants_.push_back({peer, words[1], steady_now_ns() + kInterpreterTimeNs});
        communicator_.watch().set_alarm(wants_.front().until_ns);
      }
      return push({.type = Event::Type::kStacksWanted, .rank = peer, .inquiry = words[1]});
    }
    case Note::kStacks:
      return on_stacks(peer, words);
  }
  throw ProtocolError(peer, "a note about stalls of unknown type " + std::to_string(words[0]));
}

void Stalls::on_question(int peer, std::span<const uint32_t> words) {
  if (words.size() < 4) throw ProtocolError(peer, "a question about stalls without its words");
  std::vector<uint64_t>& ids = questions_[peer];
  for (size_t at = 4; at + 1 < words.size() && ids.size() < kMostIds; at += 2) {
    ids.push_back(words[at] | uint64_t{words[at + 1]} << 32);
  }
  if (words[2] != 0) return;
  const auto question = static_cast<Question>(words[3]);
  send(peer, answer(words[1], ids, question));
  if (question == Question::kReports) {
    push({.type = Event::Type::kAsked, .rank = peer, .inquiry = words[1], .ids = std::move(ids)});
  }
  questions_.erase(peer);
}

std::vector<bool> Stalls::have_begun(std::span<const uint64_t> ids, Question question) {
  if (question != Question::kProcess) return waits_->have_begun(ids);
  std::vector<bool> has;
  for (size_t at = 0; at + 1 < ids.size(); at += 2) has.push_back(!hub_->lacks(ids[at], ids[at + 1]));
  return has;
}

std::vector<uint32_t> Stalls::answer(uint32_t inquiry, std::span<const uint64_t> ids, Question question) {
  const std::vector<bool> has = have_begun(ids, question);
  const Waits::Progress progress = waits_->progress();
  const auto [blocked, what] = hub_->blocked();
  const size_t bit_words = (has.size() + 31) / 32;
  std::string text = waits_->state();
  if (blocked.where != 0) text += std::string(text.empty() ? "" : " and ") + "waits " + what;
  text.resize(std::min(text.size(), (Watch::kNoteWords - 2 - kAnswerWords - bit_words) * sizeof(uint32_t)));
  const Answer answer{static_cast<uint32_t>(has.size()),
                      progress.is_in_negotiation ? 1u : 0u,
                      text.size(),
                      progress.calls,
                      progress.arrivals,
                      blocked};
  std::vector<uint32_t> words(2 + kAnswerWords + bit_words + (text.size() + 3) / 4);
  words[0] = static_cast<uint32_t>(Note::kAnswer);
  words[1] = inquiry;
  std::memcpy(&words[2], &answer, sizeof(answer));
  for (size_t i = 0; i < has.size(); ++i) {
    if (has[i]) words[2 + kAnswerWords + i / 32] |= 1u << (i % 32);
  }
  if (!text.empty()) std::memcpy(&words[2 + kAnswerWords + bit_words], text.data(), text.size());
  return words;
}

void Stalls::on_answer(int peer, std::span<const uint32_t> words) {
  Answer answer;
  if (words.size() < 2 + kAnswerWords) throw ProtocolError(peer, "an answer about stalls without its words");
  std::memcpy(static_cast<void*>(&answer), &words[2], sizeof(answer));
  const size_t before_text = 2 + kAnswerWords + (answer.ids + 31) / 32;
  if (answer.ids > kMostIds || words.size() < before_text) {
    throw ProtocolError(peer, "an answer about stalls to too many questions");
  }
  if (answer.text_bytes > (words.size() - before_text) * sizeof(uint32_t)) {
    throw ProtocolError(peer, "an answer about stalls without its text");
  }
  if ((words[1] & kSurvey) != 0) {
    std::lock_guard lock(mutex_);
    const auto survey = surveyed_.find(words[1]);
    if (survey != surveyed_.end()) {
      survey->second->at(static_cast<size_t>(peer)) = answer.arrivals;
      answered_.notify_all();
    }
    return;
  }
  Event event{.type = Event::Type::kAnswer, .rank = peer, .inquiry = words[1]};
  event.calls = answer.calls;
  event.is_in_negotiation = answer.is_in_negotiation != 0;
  event.blocked = answer.blocked;
  event.text.assign(reinterpret_cast<const char*>(words.data() + before_text), answer.text_bytes);
  for (size_t i = 0; i < answer.ids; ++i) {
    event.has.push_back((words[2 + kAnswerWords + i / 32] >> (i % 32) & 1) != 0);
  }
  push(std::move(event));
}

void Stalls::on_change() {
  std::lock_guard lock(mutex_);
  answered_.notify_all();  // ends the wait of a survey
}

// The interpreter's time is over: takes the stacks without it.
void Stalls::on_alarm() {
  while (true) {
    Want want{};
    {
      std::lock_guard lock(mutex_);
      if (wants_.empty()) return;
      if (wants_.front().until_ns > steady_now_ns()) return communicator_.watch().set_alarm(wants_.front().until_ns);
      want = wants_.front();
      wants_.pop_front();
    }
    const auto [taker, preface] = hub_->stacks();
    const std::string stacks = taker.take_stacks();
    send_stacks(want.rank, want.inquiry, stacks.empty() ? "" : preface + stacks, true);
  }
}

void Stalls::send_stacks(int rank, uint32_t inquiry, const std::string& text, bool is_raw) {
  const std::string_view all = std::string_view(text).substr(0, kMostTextBytes);
  size_t begin = 0;
  do {
    const std::string_view part = all.substr(begin, kBytesPerNote);
    begin += part.size();
    std::vector<uint32_t> words(5 + (part.size() + 3) / 4);
    words[0] = static_cast<uint32_t>(Note::kStacks);
    words[1] = inquiry;
    words[2] = begin < all.size() ? 1 : 0;
    words[3] = is_raw ? 1 : 0;
    words[4] = static_cast<uint32_t>(part.size());
    std::memcpy(words.data() + 5, part.data(), part.size());
    send(rank, words);
  } while (begin < all.size());
}

void Stalls::on_stacks(int peer, std::span<const uint32_t> words) {
  if (words.size() < 5 || words[4] > (words.size() - 5) * sizeof(uint32_t)) {
    throw ProtocolError(peer, "stacks shorter than their stated length");
  }
  std::string& text = arriving_[peer];
  const size_t bytes = words[4];
  if (text.size() < kMostTextBytes) text.append(reinterpret_cast<const char*>(words.data() + 5), bytes);
  if (words[2] != 0) return;
  Event event{.type = Event::Type::kStacks, .rank = peer, .inquiry = words[1]};
  event.text = std::move(text);
  event.is_raw = words[3] != 0;
  arriving_.erase(peer);
  push(std::move(event));
}

}  // namespace ronde
