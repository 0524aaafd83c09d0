// The messages between leaders, carried in notes of the watch: a type, a number, then words. Parsing checks the words
// alone; the leader checks whether the sender may send that note now (leader.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "failures/watch_message.h"

namespace ronde {

struct LeaderNote {
  enum class Type : uint32_t {
    kReady = 1,  // to the parent: the number of negotiation rounds so far; the slots that are ready on all hosts from
                 // here down
    kWant = 2,   // to the parent: one of these hosts needs negotiation round `number`
    kEntry = 3,  // to the children: 1 if more words follow, else 0; words of an entry of the log
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

// Throws ProtocolError, which names `peer`, unless these words are one complete entry of the log: a negotiation round,
// or the number of slots and then as many different slots below `capacity`.
void check_entry(std::span<const uint32_t> entry, int peer, size_t capacity);

}  // namespace ronde
