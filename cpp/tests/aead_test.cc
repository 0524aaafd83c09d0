// Test vectors of RFC 8439 (2.8.2 and A.5), messages of all lengths, and messages that a connection must refuse.
#include "links/aead.h"

#include <malloc.h>
#include <openssl/crypto.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "links/sealer.h"

namespace ronde {
namespace {

using Bytes = std::vector<std::byte>;

Bytes from_hex(std::string_view text) {
  Bytes bytes;
  for (size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::strtoul(std::string(text.substr(i, 2)).c_str(), nullptr, 16)));
  }
  return bytes;
}

Bytes from_text(std::string_view text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

template <class Array>
Array array_of(const Bytes& bytes) {
  Array array;
  CHECK(bytes.size() == array.size());
  std::copy(bytes.begin(), bytes.end(), array.begin());
  return array;
}

struct Vector {
  const char *key, *nonce, *associated, *sealed, *tag;
  std::string_view text;
};

const Vector kVectors[] = {
    {"808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9f", "070000004041424344454647",
     "50515253c0c1c2c3c4c5c6c7",
     "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b1a71de0a9e060b29"
     "05d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc3ff4def08e4b7a9de576d26586cec64b"
     "6116",
     "1ae10b594f09e26a7e902ecbd0600691",
     "Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would be "
     "it."},
    {"1c9240a5eb55d38af333888604f6b5f0473917c1402b80099dca5cbc207075c0", "000000000102030405060708",
     "f33388860000000000004e91",
     "64a0861575861af460f062c79be643bd5e805cfd345cf389f108670ac76c8cb24c6cfc18755d43eea09ee94e382d26b0bdb7b73c321b0100"
     "d4f03b7f355894cf332f830e710b97ce98c8a84abd0b948114ad176e008d33bd60f982b1ff37c8559797a06ef4f0ef61c186324e2b350638"
     "3606907b6a7c02b0f9f6157b53c867e4b9166c767b804d46a59b5216cde7a4e99040c5a40433225ee282a1b0a06c523eaf4534d7f83fa115"
     "5b0047718cbc546a0d072b04b3564eea1b422273f548271a0bb2316053fa76991955ebd63159434ecebb4e466dae5a1073a6727627097a10"
     "49e617d91d361094fa68f0ff77987130305beaba2eda04df997b714d6c6f2c29a6ad5cb4022b02709b",
     "eead9d67890cbb22392336fea1851f38",
     "Internet-Drafts are draft documents valid for a maximum of six months and may be updated, replaced, or obsoleted "
     "by other documents at any time. It is inappropriate to use Internet-Drafts as reference material or to cite them "
     "other than as /\xe2\x80\x9cwork in progress./\xe2\x80\x9d"},
};

void the_test_vectors_of_the_rfc_match() {
  for (const Vector& vector : kVectors) {
    const auto key = array_of<AeadKey>(from_hex(vector.key));
    const auto nonce = array_of<Nonce>(from_hex(vector.nonce));
    const Bytes associated = from_hex(vector.associated), text = from_text(vector.text);
    Bytes sealed(text.size());
    Aead cipher(key);
    const Tag tag = cipher.seal(nonce, associated, text, sealed.data());
    CHECK(sealed == from_hex(vector.sealed));
    CHECK(tag == array_of<Tag>(from_hex(vector.tag)));
    CHECK(cipher.open(nonce, associated, sealed, tag) && sealed == text);
  }
}

Bytes pattern(size_t size) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 2654435761u >> 9);
  return bytes;
}

const ConnectionKeys kKeys{array_of<AeadKey>(pattern(32)), {}, false};

// What libcrypto has allocated and not freed, and whether it has freed memory with the key in it.
std::set<void*> live_blocks;
bool key_was_freed = false;

bool holds_key(void* place) {
  const auto* const begin = static_cast<const std::byte*>(place);
  const auto* const end = begin + malloc_usable_size(place);
  return std::search(begin, end, kKeys.outgoing.begin(), kKeys.outgoing.begin() + 8) != end;
}

void* allocate(size_t bytes, const char*, int) {
  return *live_blocks.insert(std::calloc(1, bytes)).first;  // without what an earlier owner left
}

void free_block(void* place, const char*, int) {
  if (place == nullptr) return;
  key_was_freed = key_was_freed || holds_key(place);
  live_blocks.erase(place);
  std::free(place);
}

void* reallocate(void* place, size_t bytes, const char* file, int line) {
  void* const moved = allocate(bytes, file, line);
  if (place != nullptr) std::memcpy(moved, place, std::min(bytes, malloc_usable_size(place)));
  free_block(place, file, line);
  return moved;
}

// The memory of a process, or its core file, must not contain the keys of ended connections.
void a_sealer_that_ends_leaves_no_key() {
  const auto count = [] { return std::count_if(live_blocks.begin(), live_blocks.end(), holds_key); };
  {
    Sealer sealer(kKeys.outgoing, true);
    Bytes message = pattern(100);
    sealer.seal({1}, message, 0, message.data());
    CHECK(count() == 1);
  }
  CHECK(count() == 0 && !key_was_freed);
}

void every_change_is_detected() {
  for (const size_t size : {0, 1, 15, 16, 17, 63, 64, 65, 191, 192, 193, 255, 256, 257, 1000}) {
    for (const bool conceals : {false, true}) {
      Sealer sealer(kKeys.outgoing, conceals);
      const Bytes text = pattern(size);
      Bytes sealed = text;
      const size_t clear_bytes = std::min<size_t>(4, size);
      const Tag tag = sealer.seal({7, 3}, text, clear_bytes, sealed.data() + clear_bytes);
      CHECK((sealed == text) == (!conceals || size <= clear_bytes));
      for (size_t bit = 0; bit < 8 * (size + tag.size()); bit += size > 300 ? 97 : 5) {
        Bytes altered = sealed;
        Tag altered_tag = tag;
        std::byte& byte = bit / 8 < size ? altered[bit / 8] : altered_tag[bit / 8 - size];
        byte ^= std::byte{1} << bit % 8;
        // What was encrypted is lost, so that nobody uses it.
        Bytes after = altered;
        if (conceals) std::fill(after.begin() + clear_bytes, after.end(), std::byte{0});
        CHECK(!sealer.open({7, 3}, altered, clear_bytes, altered_tag) && altered == after);
      }
      for (const Position other : {Position{7, 2}, Position{6, 3}}) {
        Bytes moved = sealed;
        CHECK(!sealer.open(other, moved, clear_bytes, tag));
      }
      CHECK(sealer.open({7, 3}, sealed, clear_bytes, tag) && sealed == text);
    }
  }
}

// Two ends between which an attacker repeats, omits, reorders and reflects messages.
void a_message_fits_only_in_its_place(bool conceals) {
  const ConnectionKeys here{kKeys.outgoing, kKeys.incoming, conceals};
  const ConnectionKeys there{kKeys.incoming, kKeys.outgoing, conceals};
  SealedConnection sender(here), receiver(there);
  Bytes messages[3];
  for (Bytes& message : messages) {
    message = pattern(100);
    sender.seal(message, 4);
    CHECK(std::equal(message.begin(), message.begin() + 4, pattern(4).begin()));
  }
  Bytes late = messages[1], again = messages[0], back = messages[0];
  CHECK(!receiver.open(late, 4));
  CHECK(receiver.open(messages[0], 4) && std::equal(messages[0].begin(), messages[0].end() - 16, pattern(84).begin()));
  CHECK(!receiver.open(again, 4) && !receiver.open(messages[2], 4) && receiver.open(messages[1], 4));
  CHECK(!SealedConnection(here).open(back, 4));
  Bytes nothing(19);
  CHECK(!receiver.open(nothing, 4));
}

}  // namespace
}  // namespace ronde

int main() {
  using namespace ronde;
  CHECK(CRYPTO_set_mem_functions(allocate, reallocate, free_block) == 1);  // before libcrypto allocates anything
  the_test_vectors_of_the_rfc_match();
  a_sealer_that_ends_leaves_no_key();
  every_change_is_detected();
  a_message_fits_only_in_its_place(false);
  a_message_fits_only_in_its_place(true);
}
