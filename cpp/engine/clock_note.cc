#include "engine/clock_note.h"

#include "base/error.h"

namespace ronde {
namespace {

// Negative for values that no clock reaches.
int64_t time_of(uint32_t low, uint32_t high) { return static_cast<int64_t>(uint64_t{high} << 32 | low); }

}  // namespace

std::optional<ClockNote> ClockNote::parse(std::span<const uint32_t> words, int peer) {
  if (words.empty() || (words[0] != kAsk && words[0] != kAnswer)) return std::nullopt;
  ClockNote note{words[0] == kAnswer};
  if (words.size() != (note.is_answer ? 5u : 3u)) {
    throw ProtocolError(peer, "a note about clocks of " + std::to_string(words.size()) + " words");
  }
  note.asked_ns = time_of(words[1], words[2]);
  if (note.is_answer) note.answered_ns = time_of(words[3], words[4]);
  // The difference of two times that are not negative fits into int64_t.
  if (note.asked_ns < 0 || note.answered_ns < 0) throw ProtocolError(peer, "a negative time of its clock");
  return note;
}

}  // namespace ronde
