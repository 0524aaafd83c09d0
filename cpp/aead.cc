#include "aead.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "poly1305.h"

namespace ronde {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

// --- ChaCha20 -------------------------------------------------------------------------------------------------------

constexpr size_t kBlockBytes = 64;
constexpr size_t kWords = kBlockBytes / sizeof(uint32_t);
constexpr size_t kLanes = 4;  // blocks computed at once, one in each lane of the vectors

using Lanes = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));

template <int kBits>
Lanes rotated(Lanes value) {
  return value << kBits | value >> (32 - kBits);
}

void quarter_round(Lanes& a, Lanes& b, Lanes& c, Lanes& d) {
  a += b, d = rotated<16>(d ^ a);
  c += d, b = rotated<12>(b ^ c);
  a += b, d = rotated<8>(d ^ a);
  c += d, b = rotated<7>(b ^ c);
}

// The key stream under one key and nonce, a few blocks at a time.
class KeyStream {
 public:
  KeyStream(const AeadKey& key, const Nonce& nonce) {
    constexpr std::array<uint32_t, 4> kConstants = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};
    std::array<uint32_t, kWords> words{};
    std::copy(kConstants.begin(), kConstants.end(), words.begin());
    std::memcpy(&words[4], key.data(), key.size());
    std::memcpy(&words[13], nonce.data(), nonce.size());
    for (size_t i = 0; i < kWords; ++i) state_[i] = Lanes{} + words[i];
    for (uint32_t lane = 0; lane < kLanes; ++lane) state_[12][lane] = lane;
    next();
    std::copy_n(bytes_, tag_key_.size(), tag_key_.begin());
    used_ = kBlockBytes;
  }
  ~KeyStream() { explicit_bzero(state_, sizeof(state_)); }  // it contains the key
  KeyStream(const KeyStream&) = delete;
  KeyStream& operator=(const KeyStream&) = delete;

  // The key of the tag, which is the beginning of the stream.
  const std::array<std::byte, 32>& tag_key() const { return tag_key_; }

  // Combines (by xor) `from` with the stream after its first block.
  void apply(std::span<const std::byte> from, std::byte* to) {
    for (size_t begin = 0; begin < from.size();) {
      if (used_ == sizeof(bytes_)) next();
      const size_t count = std::min(from.size() - begin, sizeof(bytes_) - used_);
      for (size_t i = 0; i < count; ++i) to[begin + i] = from[begin + i] ^ bytes_[used_ + i];
      begin += count;
      used_ += count;
    }
  }

 private:
  void next() {
    Lanes x[kWords];
    std::copy(std::begin(state_), std::end(state_), x);
    for (int round = 0; round < 10; ++round) {
      for (int i = 0; i < 4; ++i) quarter_round(x[i], x[4 + i], x[8 + i], x[12 + i]);
      for (int i = 0; i < 4; ++i) quarter_round(x[i], x[4 + (i + 1) % 4], x[8 + (i + 2) % 4], x[12 + (i + 3) % 4]);
    }
    for (size_t i = 0; i < kWords; ++i) {
      const Lanes sum = x[i] + state_[i];
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const uint32_t word = sum[lane];
        std::memcpy(bytes_ + lane * kBlockBytes + i * sizeof(word), &word, sizeof(word));
      }
    }
    state_[12] += Lanes{} + static_cast<uint32_t>(kLanes);
    used_ = 0;
  }

  Lanes state_[kWords];
  alignas(16) std::byte bytes_[kLanes * kBlockBytes];
  size_t used_;
  std::array<std::byte, 32> tag_key_;
};

// --- Tags -----------------------------------------------------------------------------------------------------------

Tag tag_of(const KeyStream& stream, std::span<const std::byte> associated, std::span<const std::byte> sealed) {
  poly1305::Sum sum(stream.tag_key());
  sum.add_padded(associated);
  sum.add_padded(sealed);
  const uint64_t lengths[2] = {associated.size(), sealed.size()};
  sum.add_padded(std::as_bytes(std::span(lengths)));
  return sum.finish();
}

bool are_equal(const Tag& a, const Tag& b) {
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= std::to_integer<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

Tag aead_seal(const AeadKey& key, const Nonce& nonce, std::span<const std::byte> associated,
              std::span<const std::byte> text, std::byte* sealed) {
  KeyStream stream(key, nonce);
  stream.apply(text, sealed);
  return tag_of(stream, associated, {sealed, text.size()});
}

bool aead_open(const AeadKey& key, const Nonce& nonce, std::span<const std::byte> associated,
               std::span<std::byte> sealed, const Tag& tag) {
  KeyStream stream(key, nonce);
  if (!are_equal(tag_of(stream, associated, sealed), tag)) return false;
  stream.apply(sealed, sealed.data());
  return true;
}

}  // namespace ronde
