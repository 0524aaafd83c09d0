// The encoding of shapes. The highest byte is kSpelled plus the number of axes. The axes' lengths follow as groups of
// seven bits, the lowest first; the eighth bit of a group means that another group of the same axis follows. A shape
// that does not fit is encoded as a hash (FNV-1a over whole numbers) with the highest bit set.
#include "base/shape_word.h"

namespace ronde {
namespace {

constexpr unsigned kPayloadBits = 56;
constexpr uint64_t kSpelled = 1;
constexpr uint64_t kHashed = uint64_t{1} << 63;

template <class Number>
uint64_t hash_of(std::span<const Number> numbers) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const Number number : numbers) hash = (hash ^ static_cast<uint64_t>(number)) * 0x100000001b3;
  return hash | kHashed;
}

}  // namespace

uint64_t word_of_shape(std::span<const int64_t> shape) {
  uint64_t word = (kSpelled + shape.size()) << kPayloadBits;
  unsigned used = 0;
  for (const int64_t length : shape) {
    auto left = static_cast<uint64_t>(length);
    do {
      if (used == kPayloadBits) return hash_of(shape);
      const uint64_t group = left & 0x7f;
      left >>= 7;
      word |= (left > 0 ? group | 0x80 : group) << used;
      used += 8;
    } while (left > 0);
  }
  return word;
}

uint64_t word_of_counts(std::span<const size_t> counts) { return hash_of(counts); }

std::string describe_shape(uint64_t word) {
  const uint64_t head = word >> kPayloadBits;
  if (head < kSpelled || (word & kHashed) != 0) return "";
  std::string text = "(";
  unsigned used = 0;
  for (uint64_t axis = 0; axis < head - kSpelled; ++axis) {
    uint64_t length = 0, group = 0x80;
    for (unsigned shift = 0; (group & 0x80) != 0 && used < kPayloadBits; shift += 7, used += 8) {
      group = word >> used & 0xff;
      length |= (group & 0x7f) << shift;
    }
    text += (axis > 0 ? ", " : "") + std::to_string(length);
  }
  return text + (head - kSpelled == 1 ? ",)" : ")");
}

}  // namespace ronde
