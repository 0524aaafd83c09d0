// The neutral elements that a rank without data contributes to a reduction.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace ronde {

// Fills memory with the operation's neutral element, which changes no bit of what it is combined with: -0 for sums and
// averages of floats, the largest value for min, the lowest for max, one for products, all ones for bitwise and.
// `by_ronde`: whether Ronde's own arithmetic combines it. That leaves out kAbsentFactor (reduction.h) of products of
// complex numbers. Another library gets 1 + 0i, which changes infinite numbers.
void fill_neutral(DType dtype, ReduceOp op, void* values, size_t count, bool by_ronde = true);

}  // namespace ronde
