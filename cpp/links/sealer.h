// Authenticates the messages of one connection in one direction with a tag each, and optionally encrypts them.
//
// The rules:
//   1. Every connection has a separate key for each direction (net/authentication.py derives them from the handshake),
//      so a message from another connection, or one that is reflected to its sender, does not open.
//   2. A message is sealed for its position in the stream and opens only there: a repeated, omitted or reordered
//      message does not open. No two messages have the same position.
//   3. The receiver uses a message only after it has opened it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "links/aead.h"

namespace ronde {

// The reason in the error of a connection with a message that does not open.
constexpr const char* kAltered = "what it sent was altered, repeated or left out on the way";

// The keys of one connection. `conceals`: messages are encrypted, not only authenticated.
struct ConnectionKeys {
  AeadKey outgoing{};
  AeadKey incoming{};
  bool conceals = false;
};

// The number of a message in its direction, and of a part of it with a separate tag.
struct Position {
  uint64_t message = 0;
  uint32_t part = 0;
};

class Sealer {
 public:
  Sealer(const AeadKey& key, bool conceals) : cipher_(key), conceals_(conceals) {}

  // Whether messages are encrypted.
  bool conceals() const { return conceals_; }

  // Returns the tag of a message, whose first `clear_bytes` always stay readable. If conceals(), encrypts the rest into
  // `sealed`, which may be the same memory; otherwise leaves `sealed` alone.
  Tag seal(Position position, std::span<const std::byte> message, size_t clear_bytes, std::byte* sealed) {
    const size_t clear = conceals_ ? clear_bytes : message.size();
    return cipher_.seal(nonce(position), message.first(clear), message.subspan(clear), sealed);
  }

  // Turns a received message back into the one that was sealed. Returns false if the tag does not match; the encrypted
  // part is then lost (Aead::open).
  bool open(Position position, std::span<std::byte> message, size_t clear_bytes, const Tag& tag) {
    const size_t clear = conceals_ ? clear_bytes : message.size();
    return cipher_.open(nonce(position), message.first(clear), message.subspan(clear), tag);
  }

 private:
  static Nonce nonce(Position position) {
    static_assert(sizeof(position.message) + sizeof(position.part) == sizeof(Nonce));
    Nonce nonce;
    std::memcpy(nonce.data(), &position.message, sizeof(position.message));
    std::memcpy(nonce.data() + sizeof(position.message), &position.part, sizeof(position.part));
    return nonce;
  }

  Aead cipher_;
  bool conceals_;
};

// Both directions of a connection whose messages follow each other, each with its tag behind it.
class SealedConnection {
 public:
  explicit SealedConnection(const ConnectionKeys& keys)
      : outgoing_(keys.outgoing, keys.conceals), incoming_(keys.incoming, keys.conceals) {}

  // Seals the next message in place and writes its tag to the last kTagBytes bytes.
  void seal(std::span<std::byte> message, size_t clear_bytes = 0) {
    const auto text = message.first(message.size() - kTagBytes);
    const Tag tag = outgoing_.seal({++sent_}, text, clear_bytes, text.data() + clear_bytes);
    std::memcpy(text.data() + text.size(), tag.data(), tag.size());
  }

  // Opens the next message in place. Returns false if it is not the next message; the connection is then unusable.
  bool open(std::span<std::byte> message, size_t clear_bytes = 0) {
    if (message.size() < clear_bytes + kTagBytes) return false;
    const auto text = message.first(message.size() - kTagBytes);
    Tag tag;
    std::memcpy(tag.data(), text.data() + text.size(), tag.size());
    if (!incoming_.open({received_ + 1}, text, clear_bytes, tag)) return false;
    ++received_;
    return true;
  }

 private:
  Sealer outgoing_, incoming_;
  uint64_t sent_ = 0, received_ = 0;
};

}  // namespace ronde
