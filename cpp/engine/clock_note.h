// The messages by which ranks compare their clocks, carried in notes of the watch (clock_offset.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace ronde {

struct ClockNote {
  // The first word of a note. Leaders' notes begin with small numbers.
  static constexpr uint32_t kAsk = 0x6b6c4301, kAnswer = 0x6b6c4302;

  bool is_answer;
  int64_t asked_ns = 0;     // by the asking rank's clock
  int64_t answered_ns = 0;  // by the answering rank's clock

  // Returns nothing if the note is not about clocks. Throws ProtocolError, which names `peer`.
  static std::optional<ClockNote> parse(std::span<const uint32_t> words, int peer);
};

}  // namespace ronde
