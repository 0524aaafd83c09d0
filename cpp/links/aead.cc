#include "links/aead.h"

#include <openssl/err.h>
#include <openssl/evp.h>

#include <algorithm>
#include <new>
#include <stdexcept>

namespace ronde {
namespace {

// libcrypto counts bytes in an int.
constexpr size_t kAtOnceBytes = size_t{1} << 30;

unsigned char* writable(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }

const unsigned char* readable(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }

void check(int succeeded) {
  if (succeeded != 1) throw std::runtime_error("libcrypto could not compute ChaCha20-Poly1305");
}

}  // namespace

void Aead::Free::operator()(evp_cipher_ctx_st* context) const { EVP_CIPHER_CTX_free(context); }

Aead::Aead(const AeadKey& key) : context_(EVP_CIPHER_CTX_new()) {
  if (!context_) throw std::bad_alloc();
  ERR_set_mark();
  const int succeeded =
      EVP_CipherInit_ex2(context_.get(), EVP_chacha20_poly1305(), readable(key.data()), nullptr, 1, nullptr);
  ERR_pop_to_mark();
  if (succeeded != 1) {
    throw std::runtime_error(
        "OpenSSL's libcrypto offers no ChaCha20-Poly1305 here, so messages cannot be authenticated: the machine or "
        "OPENSSL_CONF may allow FIPS algorithms only");
  }
}

Tag Aead::seal(const Nonce& nonce, std::span<const std::byte> associated, std::span<const std::byte> text,
               std::byte* sealed) {
  begin(true, nonce, associated);
  pass(text, sealed);
  int more = 0;  // a stream cipher leaves nothing for the end
  unsigned char end[1];
  check(EVP_CipherFinal_ex(context_.get(), end, &more));
  Tag tag;
  check(EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, kTagBytes, tag.data()));
  return tag;
}

bool Aead::open(const Nonce& nonce, std::span<const std::byte> associated, std::span<std::byte> sealed,
                const Tag& tag) {
  begin(false, nonce, associated);
  Tag expected = tag;
  check(EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_SET_TAG, kTagBytes, expected.data()));
  pass(sealed, sealed.data());
  int more = 0;
  unsigned char end[1];
  ERR_set_mark();  // the errors of this thread belong to its program, too
  const bool matches = EVP_CipherFinal_ex(context_.get(), end, &more) == 1;
  ERR_pop_to_mark();
  if (!matches) std::fill(sealed.begin(), sealed.end(), std::byte{0});
  return matches;
}

void Aead::begin(bool encrypts, const Nonce& nonce, std::span<const std::byte> associated) {
  check(EVP_CipherInit_ex2(context_.get(), nullptr, nullptr, readable(nonce.data()), encrypts, nullptr));
  pass(associated, nullptr);
}

void Aead::pass(std::span<const std::byte> from, std::byte* to) {
  while (!from.empty()) {
    const size_t bytes = std::min(from.size(), kAtOnceBytes);
    int passed = 0;
    check(EVP_CipherUpdate(context_.get(), to == nullptr ? nullptr : writable(to), &passed, readable(from.data()),
                           static_cast<int>(bytes)));
    from = from.subspan(bytes);
    if (to != nullptr) to += bytes;
  }
}

}  // namespace ronde
