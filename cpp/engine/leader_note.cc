#include "engine/leader_note.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "engine/board.h"

namespace ronde {

void check_slots(std::span<const uint32_t> slots, int peer, size_t capacity) {
  for (const uint32_t slot : slots) {
    if (slot < capacity) continue;
    throw ProtocolError(peer,
                        "slot " + std::to_string(slot) + " of a cache with " + std::to_string(capacity) + " slots");
  }
}

LeaderNote LeaderNote::parse(std::span<const uint32_t> note, int peer, size_t capacity) {
  if (note.size() < 2) throw ProtocolError(peer, "a leader's note of " + std::to_string(note.size()) + " words");
  LeaderNote parsed{static_cast<Type>(note[0]), note[1], {note.begin() + 2, note.end()}};
  switch (parsed.type) {
    case Type::kReady:
      check_slots(parsed.words, peer, capacity);
      return parsed;
    case Type::kWant:
      if (!parsed.words.empty()) throw ProtocolError(peer, "a request for a negotiation round with extra words");
      return parsed;
    case Type::kEntry:
      if (parsed.words.empty() || parsed.number > 1) throw ProtocolError(peer, "a part of an entry without its words");
      return parsed;
  }
  throw ProtocolError(peer, "a leader's note of unknown type " + std::to_string(note[0]));
}

void check_entry(std::span<const uint32_t> entry, int peer, size_t capacity) {
  if (entry.size() == 1 && entry.front() == kNegotiationEntry) return;
  if (entry.size() < 2 || entry.front() != entry.size() - 1) {
    throw ProtocolError(peer, "an entry of the log of " + std::to_string(entry.size()) + " words" +
                                  (entry.empty() ? "" : " that claims " + std::to_string(entry.front()) + " slots"));
  }
  const auto slots = entry.subspan(1);
  check_slots(slots, peer, capacity);
  std::vector<uint32_t> sorted(slots.begin(), slots.end());
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) throw ProtocolError(peer, "an entry that runs slot " + std::to_string(*twice) + " twice");
}

}  // namespace ronde
