// Multiplies by a factor, as an all-reduce does before and after the sum.
#pragma once

#include <cstddef>

#include "types.h"

namespace ronde {

// destination[i] = source[i] * factor. 16-bit floats are multiplied in float32. Integers are multiplied in float64,
// rounded towards zero and clamped to the limits of their type (NaN becomes 0). Bool does not change. Both may be the
// same memory but must not overlap otherwise. The factor 1 copies.
void scale(DType dtype, void* destination, const void* source, size_t count, double factor);

// The same from a 16-bit type to float32, and from float32 to a 16-bit type with one rounding.
void scale_to_float32(DType dtype, float* destination, const void* source, size_t count, double factor);
void scale_from_float32(DType dtype, void* destination, const float* source, size_t count, double factor);

}  // namespace ronde
