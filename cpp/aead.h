// ChaCha20-Poly1305 of RFC 8439: encrypts a message, or leaves it readable, and makes a tag by which whoever has the
// key notices any change.
//
// The rule: one key never sees two messages under one nonce. sealer.h keeps it.
#pragma once

#include <string.h>

#include <array>
#include <cstddef>
#include <span>

namespace ronde {

constexpr size_t kTagBytes = 16;

// Every copy is wiped when it ends, so that neither freed memory nor a core file shows it.
struct AeadKey : std::array<std::byte, 32> {
  ~AeadKey() { explicit_bzero(data(), size()); }
};
using Nonce = std::array<std::byte, 12>;
using Tag = std::array<std::byte, kTagBytes>;

// Writes the encrypted `text` to `sealed`, which may be the text itself; returns the tag of it and of `associated`,
// which travels as it is. At most 2^32 - 2 blocks of 64 bytes.
Tag aead_seal(const AeadKey& key, const Nonce& nonce, std::span<const std::byte> associated,
              std::span<const std::byte> text, std::byte* sealed);

// Decrypts `sealed` in place if the tag fits; otherwise returns false and changes nothing. The time it takes to look
// does not depend on how much of a tag is right.
bool aead_open(const AeadKey& key, const Nonce& nonce, std::span<const std::byte> associated,
               std::span<std::byte> sealed, const Tag& tag);

}  // namespace ronde
