// What ranks tell each other about their clocks, in notes of the watch (clock_offset.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace ronde {

struct ClockNote {
  // The first word of a note. Those of leaders are small numbers.
  static constexpr uint32_t kAsk = 0x6b6c4301, kTell = 0x6b6c4302;

  bool is_answer;
  int64_t asked_ns = 0;  // by the clock of whoever asked
  int64_t told_ns = 0;   // by that of whoever answered

  // Nothing if the note is about something else. Throws ProtocolError, which names `peer`.
  static std::optional<ClockNote> parse(std::span<const uint32_t> words, int peer);
};

}  // namespace ronde
