// Poly1305 of RFC 8439: the tag of a message under a key that is used for this message only. No branch and no address
// depends on the key or the message.
//
// The tag is a polynomial in r, half of the key, modulo 2^130 - 5, to which the other half is added.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "aead.h"

namespace ronde::poly1305 {

__extension__ using Wide = unsigned __int128;

// A number modulo 2^130 - 5, as the sum of low, middle * 2^44 and high * 2^88. Between two carries a limb may have some
// more bits than its 44, 44 or 42.
struct Limbs {
  uint64_t low = 0, middle = 0, high = 0;
};

constexpr int kLimbBits = 44, kHighBits = 130 - 2 * kLimbBits;
constexpr uint64_t kLimbMask = (uint64_t{1} << kLimbBits) - 1, kHighMask = (uint64_t{1} << kHighBits) - 1;

inline Limbs operator+(const Limbs& a, const Limbs& b) { return {a.low + b.low, a.middle + b.middle, a.high + b.high}; }

inline Limbs limbs_of(uint64_t low, uint64_t high) {
  return {low & kLimbMask, (low >> kLimbBits | high << (64 - kLimbBits)) & kLimbMask, high >> (2 * kLimbBits - 64)};
}

// A sum of products. Carries happen only when it is complete.
class ProductSum {
 public:
  [[gnu::always_inline]] void add(const Limbs& a, const Limbs& b) {
    // 2^132 is 4 * 5 modulo 2^130 - 5, so a product at 2^132 counts 20 times at 2^0, and likewise above.
    const uint64_t folded_middle = 20 * b.middle, folded_high = 20 * b.high;
    low_ += Wide{a.low} * b.low + Wide{a.middle} * folded_high + Wide{a.high} * folded_middle;
    middle_ += Wide{a.low} * b.middle + Wide{a.middle} * b.low + Wide{a.high} * folded_high;
    high_ += Wide{a.low} * b.high + Wide{a.middle} * b.middle + Wide{a.high} * b.low;
  }

  [[gnu::always_inline]] Limbs carried() const {
    const Wide middle = middle_ + static_cast<uint64_t>(low_ >> kLimbBits);
    const Wide high = high_ + static_cast<uint64_t>(middle >> kLimbBits);
    const uint64_t low = (static_cast<uint64_t>(low_) & kLimbMask) + 5 * static_cast<uint64_t>(high >> kHighBits);
    return {low & kLimbMask, (static_cast<uint64_t>(middle) & kLimbMask) + (low >> kLimbBits),
            static_cast<uint64_t>(high) & kHighMask};
  }

 private:
  Wide low_ = 0, middle_ = 0, high_ = 0;
};

inline Limbs product(const Limbs& a, const Limbs& b) {
  ProductSum sum;
  sum.add(a, b);
  return sum.carried();
}

// The sum of all blocks, each times r to the power of the number of blocks from it to the last. Several blocks enter at
// once, each times its power of r: their products do not depend on each other, so the processor computes them in
// parallel.
class Sum {
 public:
  explicit Sum(const std::array<std::byte, 32>& key) {
    uint64_t words[4];
    std::memcpy(words, key.data(), sizeof(words));
    powers_[0] = limbs_of(words[0] & 0x0ffffffc0fffffff, words[1] & 0x0ffffffc0ffffffc);
    for (size_t i = 1; i < kAtOnce; ++i) powers_[i] = product(powers_[i - 1], powers_[0]);
    pad_[0] = words[2];
    pad_[1] = words[3];
  }

  // Adds the bytes, padded with zeros to a whole block.
  void add_padded(std::span<const std::byte> bytes) {
    for (; bytes.size() >= kAtOnce * kTagBytes; bytes = bytes.subspan(kAtOnce * kTagBytes)) {
      add_blocks<kAtOnce>(bytes.data());
    }
    for (; bytes.size() >= kTagBytes; bytes = bytes.subspan(kTagBytes)) add_blocks<1>(bytes.data());
    if (bytes.empty()) return;
    std::byte last[kTagBytes] = {};
    std::memcpy(last, bytes.data(), bytes.size());
    add_blocks<1>(last);
  }

  Tag finish() const {
    // Carry the rest, so that the sum is less than twice the modulus. Then subtract the modulus once, without a branch,
    // if the sum is not smaller.
    uint64_t middle = sum_.middle, high = sum_.high + (middle >> kLimbBits);
    uint64_t low = sum_.low + 5 * (high >> kHighBits);
    middle = (middle & kLimbMask) + (low >> kLimbBits);
    low &= kLimbMask;
    high = (high & kHighMask) + (middle >> kLimbBits);
    middle &= kLimbMask;
    const uint64_t low5 = low + 5, middle5 = middle + (low5 >> kLimbBits), high5 = high + (middle5 >> kLimbBits);
    const uint64_t is_above = 0 - (high5 >> kHighBits);  // all ones, or zero
    const auto chosen = [&](uint64_t if_above, uint64_t otherwise) {
      return ((if_above & is_above) | (otherwise & ~is_above)) & kLimbMask;
    };
    low = chosen(low5, low), middle = chosen(middle5, middle), high = chosen(high5, high);

    const Wide sum0 = Wide{low | middle << kLimbBits} + pad_[0];
    const uint64_t upper = middle >> (64 - kLimbBits) | high << (2 * kLimbBits - 64);
    const uint64_t words[2] = {static_cast<uint64_t>(sum0), upper + pad_[1] + static_cast<uint64_t>(sum0 >> 64)};
    Tag tag;
    std::memcpy(tag.data(), words, sizeof(words));
    return tag;
  }

 private:
  static constexpr size_t kAtOnce = 4;

  static Limbs block_at(const std::byte* place) {
    uint64_t words[2];
    std::memcpy(words, place, sizeof(words));
    Limbs block = limbs_of(words[0], words[1]);
    block.high |= uint64_t{1} << (128 - 2 * kLimbBits);  // a whole block has a bit above its bytes
    return block;
  }

  template <size_t kBlocks>
  void add_blocks(const std::byte* blocks) {
    ProductSum products;
    products.add(sum_ + block_at(blocks), powers_[kBlocks - 1]);
    for (size_t i = 1; i < kBlocks; ++i) products.add(block_at(blocks + i * kTagBytes), powers_[kBlocks - 1 - i]);
    sum_ = products.carried();
  }

  Limbs powers_[kAtOnce];  // r, r^2, ...
  Limbs sum_;
  uint64_t pad_[2];
};

}  // namespace ronde::poly1305
