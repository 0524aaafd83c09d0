// The neutral elements that a rank without data contributes to a reduction.
#pragma once

#include <cstddef>

#include "types.h"

namespace ronde {

// Fills memory with the operation's neutral element: zero for sums and averages, the largest value for min, the lowest
// for max, one for products, all ones for bitwise and.
void fill_neutral(DType dtype, ReduceOp op, void* values, size_t count);

}  // namespace ronde
