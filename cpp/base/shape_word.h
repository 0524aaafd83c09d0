// The shape of an array in one word, so that a Call can carry it and ranks can compare it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace ronde {

// Equal for equal shapes. Different shapes have different words if both are short enough to be encoded exactly;
// otherwise their words are equal with a probability of 2^-63. Never 0, which means that the shape does not matter.
uint64_t word_of_shape(std::span<const int64_t> shape);

// The same for a list of counts, which cannot be decoded.
uint64_t word_of_counts(std::span<const size_t> counts);

// "(4, 2)", or "" if the word does not encode the shape exactly.
std::string describe_shape(uint64_t word);

}  // namespace ronde
