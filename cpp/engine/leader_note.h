// What leaders tell each other, in notes of the watch: a type, a number, then words. Checked here as far as the words
// alone can tell; whether a note fits what its sender may say now is for the leader (leader.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "watch_message.h"

namespace ronde {

struct LeaderNote {
  enum class Type : uint32_t {
    kReady = 1,  // to the parent: `number` cold rounds so far, then slots that are ready on all hosts from here down
    kWant = 2,   // to the parent: one of these hosts needs cold round `number`
    kEntry = 3,  // to the children: `number` is 1 if more follows; words of an entry of the log
  };
  static constexpr size_t kWords = WatchMessage::kNoteWords - 2;  // at most

  Type type;
  uint32_t number;
  std::vector<uint32_t> words;

  // Throws ProtocolError, which names `peer`.
  static LeaderNote parse(std::span<const uint32_t> note, int peer, size_t capacity);
};

// Throws ProtocolError, which names `peer`, unless all of them are below `capacity`.
void check_slots(std::span<const uint32_t> slots, int peer, size_t capacity);

// Throws ProtocolError, which names `peer`, unless these are a whole entry of the log: a cold round, or how many slots,
// then that many different ones of `capacity`.
void check_entry(std::span<const uint32_t> entry, int peer, size_t capacity);

}  // namespace ronde
