// ChaCha20-Poly1305 of RFC 8439: encrypts a message, or leaves it readable, and computes a tag that reveals any change
// to a holder of the key.
//
// The rule: a key is used for at most one message per nonce. sealer.h ensures it.
#pragma once

#include <string.h>

#include <array>
#include <cstddef>
#include <span>

namespace ronde {

constexpr size_t kTagBytes = 16;

// The destructor wipes each copy, so that neither freed memory nor a core file contains it.
struct AeadKey : std::array<std::byte, 32> {
  ~AeadKey() { explicit_bzero(data(), size()); }
};
using Nonce = std::array<std::byte, 12>;
using Tag = std::array<std::byte, kTagBytes>;

// Encrypts `text` into `sealed`, which may be the same memory, and returns the tag of it and of `associated`, which
// stays readable. At most 2^32 - 2 blocks of 64 bytes.
Tag aead_seal(const AeadKey& key, const Nonce& nonce, std::span<const std::byte> associated,
              std::span<const std::byte> text, std::byte* sealed);

// Decrypts `sealed` in place if the tag matches; otherwise returns false and changes nothing. The comparison takes the
// same time however much of the tag matches.
bool aead_open(const AeadKey& key, const Nonce& nonce, std::span<const std::byte> associated,
               std::span<std::byte> sealed, const Tag& tag);

}  // namespace ronde
