// What watches tell each other: one message of a fixed size. Little endian, as every machine we build for.
//
// Whatever arrives is checked here, field by field, before anybody acts on it: a peer that has passed the handshake may
// still be broken, or of another version. What does not fit is a ProtocolError, never a crash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "call.h"

namespace ronde {

struct WatchMessage {
  enum class Type : uint32_t { kGoodbye = 1, kFailure = 2, kLongCall = 3, kNote = 4, kRead = 5, kDescriptor = 6 };
  static constexpr uint32_t kMagic = 0x576e6f52;  // "RonW"
  static constexpr size_t kMissing = 16;          // of a time-out's ranks as many as fit
  static constexpr size_t kNoteWords = 96;
  static constexpr uint32_t kChannels = 2;
  static constexpr uint64_t kNoCalls = UINT64_MAX;  // no goodbye says so

  uint32_t magic = kMagic;
  Type type = Type::kGoodbye;
  uint64_t communicator = 0;  // for which it is; of kRead: none
  uint64_t calls_made = 0;    // of a long send or receive: messages that have gone that way before; of kRead: messages
                              // other than such that its sender has read from us so far
  Call call;
  int32_t failure_kind = 0;
  int32_t rank = -1;          // of a note: the channel; of a long send or receive: the other end
  int32_t missing_count = 0;  // of a long send or receive: 1 if it sends; of a note: words;
                              // of a descriptor: 1 if one comes along, 0 if its sender has none to give
  int32_t missing[kMissing] = {};
  char reason[388] = {};  // of a note its words

  // Of a message that came from process `process`, what a connection needs. Throws ProtocolError.
  struct Header {
    Type type;
    uint64_t communicator;
    uint64_t calls_made;
  };
  static Header header(std::span<const std::byte> bytes, int process);
  // The bytes of a whole message, which came from `peer` of `size` ranks. Throws ProtocolError.
  static WatchMessage parse(std::span<const std::byte> bytes, int peer, int size);

  // Of a failure.
  void set_reason(std::string_view text);
  std::string reason_text() const;
  std::vector<int> missing_ranks() const { return {missing, missing + missing_count}; }
};
static_assert(sizeof(WatchMessage) == 520);
static_assert(WatchMessage::kNoteWords * sizeof(uint32_t) <= sizeof(WatchMessage::reason));

// At most `most` bytes of the text, as UTF-8 that ends with a whole character; what is none, or would control a
// terminal, becomes '?'.
std::string printable(std::string_view text, size_t most);

}  // namespace ronde
