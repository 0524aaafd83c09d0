// What makes the bytes of one connection, in one direction, those of its other end: a tag for each message, and by
// choice no readable text.
//
// The rules:
//   1. Every connection has keys of its own, one for each direction (net/authentication.py derives them from the
//      handshake), so nothing fits that comes from another connection or back from where it was sent.
//   2. A message is sealed for its place in the stream, and opened only there: what is repeated, left out or exchanged
//      does not fit. No two messages have one place.
//   3. Nothing is done with a message before it has been opened.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "aead.h"

namespace ronde {

// For people whose connection that happens to.
constexpr const char* kAltered = "what it sent was altered, repeated or left out on the way";

// Of one connection. `conceals`: messages are encrypted, not only guarded.
struct ConnectionKeys {
  AeadKey outgoing{};
  AeadKey incoming{};
  bool conceals = false;
};

// The number of a message in its direction, and of a part of it that has a tag of its own.
struct Position {
  uint64_t message = 0;
  uint32_t part = 0;
};

class Sealer {
 public:
  Sealer(const AeadKey& key, bool conceals) : key_(key), conceals_(conceals) {}

  // Whether what travels is not what was sent.
  bool conceals() const { return conceals_; }

  // The tag of a message, whose first `clear_bytes` travel as they are in any case. If it conceals, the rest is
  // encrypted to `sealed`, which may be where it lies; otherwise `sealed` is left alone.
  Tag seal(Position position, std::span<const std::byte> message, size_t clear_bytes, std::byte* sealed) const {
    const size_t clear = conceals_ ? clear_bytes : message.size();
    return aead_seal(key_, nonce(position), message.first(clear), message.subspan(clear), sealed);
  }

  // Makes of what has come the message that was sealed. False, and nothing is changed: it is another.
  bool open(Position position, std::span<std::byte> message, size_t clear_bytes, const Tag& tag) const {
    const size_t clear = conceals_ ? clear_bytes : message.size();
    return aead_open(key_, nonce(position), message.first(clear), message.subspan(clear), tag);
  }

 private:
  static Nonce nonce(Position position) {
    static_assert(sizeof(position.message) + sizeof(position.part) == sizeof(Nonce));
    Nonce nonce;
    std::memcpy(nonce.data(), &position.message, sizeof(position.message));
    std::memcpy(nonce.data() + sizeof(position.message), &position.part, sizeof(position.part));
    return nonce;
  }

  AeadKey key_;
  bool conceals_;
};

// Both directions of a connection that carries one message after the other, each followed by its tag.
class SealedConnection {
 public:
  explicit SealedConnection(const ConnectionKeys& keys)
      : outgoing_(keys.outgoing, keys.conceals), incoming_(keys.incoming, keys.conceals) {}

  // Seals the next message where it lies, up to its last kTagBytes bytes, which become its tag.
  void seal(std::span<std::byte> message, size_t clear_bytes = 0) {
    const auto text = message.first(message.size() - kTagBytes);
    const Tag tag = outgoing_.seal({++sent_}, text, clear_bytes, text.data() + clear_bytes);
    std::memcpy(text.data() + text.size(), tag.data(), tag.size());
  }

  // The same the other way round. False if that is not the next message: the connection is of no use any more.
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
