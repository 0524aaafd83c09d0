// The message between watches, of a fixed size, little endian like every supported machine.
//
// The receiver checks it field by field before it acts on it: a peer that has passed the handshake may still be broken,
// or run another version. A malformed message is a ProtocolError, never a crash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "communicator/call.h"

namespace ronde {

struct WatchMessage {
  enum class Type : uint32_t { kGoodbye = 1, kFailure = 2, kLongCall = 3, kNote = 4, kRead = 5, kDescriptor = 6 };
  static constexpr uint32_t kMagic = 0x576e6f52;  // "RonW"
  static constexpr size_t kMissing = 16;          // at most this many missing ranks of a time-out
  static constexpr size_t kNoteWords = 96;
  static constexpr uint32_t kChannels = 2;
  static constexpr uint64_t kNoCalls = UINT64_MAX;  // not a valid number of calls in a goodbye

  uint32_t magic = kMagic;
  Type type = Type::kGoodbye;
  uint64_t communicator = 0;  // the communicator's number; kRead: unused
  uint64_t calls_made = 0;    // long send or receive: earlier messages in that direction;
                              // kRead: messages, without those of kRead, that its sender has read from the receiver
  Call call;
  int32_t failure_kind = 0;
  int32_t rank = -1;          // note: the channel; long send or receive: the peer
  int32_t missing_count = 0;  // long send or receive: 1 if it sends; note: the number of words;
                              // descriptor: 1 if one is attached, 0 if its sender has none
  int32_t missing[kMissing] = {};
  char reason[388] = {};  // note: its words

  // The fields of a message from process `process` that its connection needs. Throws ProtocolError.
  struct Header {
    Type type;
    uint64_t communicator;
    uint64_t calls_made;
  };
  static Header header(std::span<const std::byte> bytes, int process);
  // Parses a whole message from `peer`, one of `size` ranks. Throws ProtocolError.
  static WatchMessage parse(std::span<const std::byte> bytes, int peer, int size);

  // For failures.
  void set_reason(std::string_view text);
  std::string reason_text() const;
  std::vector<int> missing_ranks() const { return {missing, missing + missing_count}; }
};
static_assert(sizeof(WatchMessage) == 520);
static_assert(WatchMessage::kNoteWords * sizeof(uint32_t) <= sizeof(WatchMessage::reason));

// At most `most` bytes of the text, as UTF-8 that ends with a whole character. Invalid bytes become '?', as do control
// characters other than newline and tab.
std::string printable(std::string_view text, size_t most);

}  // namespace ronde
