#include "engine/clock_offset.h"

#include <algorithm>

#include "base/error.h"
#include "base/steady_clock.h"
#include "engine/clock_note.h"

namespace ronde {
namespace {

constexpr int kTrips = 16;
constexpr int64_t kPatienceNs = 5'000'000'000;  // after 5 s a note counts as lost

uint32_t low(int64_t ns) { return static_cast<uint32_t>(static_cast<uint64_t>(ns)); }
uint32_t high(int64_t ns) { return static_cast<uint32_t>(static_cast<uint64_t>(ns) >> 32); }

}  // namespace

void ClockOffset::measure() {
  const std::vector<int>& host_of = communicator_.host_of();
  const int64_t now = steady_now_ns();
  if (host_of[0] == host_of[communicator_.rank()]) return report_(now, 0, 0);
  std::lock_guard lock(measuring_);
  if (left_ > 0 && now - begun_ns_ < kPatienceNs) return;
  left_ = kTrips;
  begun_ns_ = now;
  best_trip_ns_ = INT64_MAX;
  ask_time();
}

void ClockOffset::ask_time() {
  const int64_t now = steady_now_ns();
  const uint32_t words[] = {ClockNote::kAsk, low(now), high(now)};
  communicator_.watch().send_note(0, words);
}

bool ClockOffset::on_note(int peer, std::span<const uint32_t> words) {
  const int64_t now = steady_now_ns();
  const auto note = ClockNote::parse(words, peer);
  if (!note) return false;
  if (!note->is_answer) {
    if (communicator_.rank() != 0) throw ProtocolError(peer, "a question about a clock, which only rank 0 answers");
    const uint32_t answer[] = {ClockNote::kAnswer, words[1], words[2], low(now), high(now)};
    communicator_.watch().send_note(peer, answer);
    return true;
  }
  if (peer != 0 || note->asked_ns > now) throw ProtocolError(peer, "an answer about its clock without a question");
  add_answer(note->asked_ns, note->answered_ns, now);
  return true;
}

void ClockOffset::add_answer(int64_t asked_ns, int64_t answered_ns, int64_t now_ns) {
  std::lock_guard lock(measuring_);
  if (left_ == 0 || asked_ns < begun_ns_) return;  // belongs to an earlier measurement
  const int64_t trip_ns = now_ns - asked_ns;
  if (trip_ns < best_trip_ns_) {
    best_trip_ns_ = trip_ns;
    best_ns_ = asked_ns + trip_ns / 2;
    offset_ns_ = answered_ns - best_ns_;
  }
  if (--left_ > 0) return ask_time();
  report_(best_ns_, offset_ns_, static_cast<uint32_t>(std::min<int64_t>(best_trip_ns_ / 2 + 1, UINT32_MAX)));
}

}  // namespace ronde
