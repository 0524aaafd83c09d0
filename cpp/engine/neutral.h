// What a rank that has run out of data contributes to a reduction.
#pragma once

#include <cstddef>

#include "types.h"

namespace ronde {

// Fills memory with the element that changes nothing: zero for sums and averages, the largest value for min, the lowest
// for max, one for products, all ones for bitwise and.
void fill_neutral(DType dtype, ReduceOp op, void* values, size_t count);

}  // namespace ronde
