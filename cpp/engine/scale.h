// Multiplying by a factor, and dividing integers: what an all-reduce does before and after the sum.
#pragma once

#include <cstddef>

#include "types.h"

namespace ronde {

bool is_integer(DType dtype);

// destination[i] = source[i] * factor. 16-bit floats are computed in float32, integers in float64 (and cut off), bool
// stays as it is. The two may be the same memory, but must not overlap otherwise.
void scale(DType dtype, void* destination, const void* source, size_t count, double factor);

// values[i] = floor(values[i] / divisor), for integers.
void floor_divide(DType dtype, void* values, size_t count, int divisor);

}  // namespace ronde
