// ChaCha20-Poly1305 of RFC 8439, computed by OpenSSL's libcrypto: encrypts a message, or leaves it readable, and
// computes a tag that reveals any change to a holder of the key.
//
// The rule: a key is used for at most one message per nonce. sealer.h ensures it.
#pragma once

#include <string.h>

#include <array>
#include <cstddef>
#include <memory>
#include <span>

struct evp_cipher_ctx_st;  // EVP_CIPHER_CTX

namespace ronde {

constexpr size_t kTagBytes = 16;

// The destructor wipes each copy, so that neither freed memory nor a core file contains it.
struct AeadKey : std::array<std::byte, 32> {
  ~AeadKey() { explicit_bzero(data(), size()); }
};
using Nonce = std::array<std::byte, 12>;
using Tag = std::array<std::byte, kTagBytes>;

// The cipher under one key. One thread at a time uses it. libcrypto has the only copy of the key, and wipes it at the
// end. Every member throws std::runtime_error if libcrypto fails; the constructor does where it has no such cipher.
class Aead {
 public:
  explicit Aead(const AeadKey& key);

  // Encrypts `text` into `sealed`, which may be the same memory, and returns the tag of it and of `associated`, which
  // stays readable. At most 2^32 - 2 blocks of 64 bytes.
  Tag seal(const Nonce& nonce, std::span<const std::byte> associated, std::span<const std::byte> text,
           std::byte* sealed);

  // Decrypts `sealed` in place and returns true if the tag matches. Otherwise returns false, and `sealed` has only
  // zeros: nothing that was not authenticated remains. The comparison takes the same time however much of the tag
  // matches.
  bool open(const Nonce& nonce, std::span<const std::byte> associated, std::span<std::byte> sealed, const Tag& tag);

 private:
  struct Free {
    void operator()(evp_cipher_ctx_st* context) const;
  };

  // Gives libcrypto the nonce of the next message and its readable part.
  void begin(bool encrypts, const Nonce& nonce, std::span<const std::byte> associated);
  // Passes bytes through the cipher to `to`, or into the tag only if that is null.
  void pass(std::span<const std::byte> from, std::byte* to);

  std::unique_ptr<evp_cipher_ctx_st, Free> context_;
};

}  // namespace ronde
