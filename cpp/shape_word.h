// The shape of an array in one word, so that ranks can compare shapes wherever they compare calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace ronde {

// Equal for equal shapes. Different shapes have different words if both are short enough to be spelled out; otherwise
// their words are equal only by a chance of one in 2^63. Never 0, which stands for an array whose shape does not
// matter.
uint64_t word_of_shape(std::span<const int64_t> shape);

// The same for any list of numbers, of which nothing can be read again.
uint64_t word_of_counts(std::span<const size_t> counts);

// "(4, 2)", or "" if the word does not spell the shape out.
std::string describe_shape(uint64_t word);

}  // namespace ronde
