// Multiplying by a factor: what an all-reduce does before and after the sum.
#pragma once

#include <cstddef>

#include "types.h"

namespace ronde {

// destination[i] = source[i] * factor. 16-bit floats are computed in float32. Integers are computed in float64, cut off
// towards zero, and end at the limits of their type (NaN becomes 0). Bool stays as it is. The two may be the same
// memory but must not overlap otherwise; with the factor 1 they are just copied.
void scale(DType dtype, void* destination, const void* source, size_t count, double factor);

// The same from a 16-bit type to float32, and from float32 to a 16-bit type, rounded once.
void scale_to_float32(DType dtype, float* destination, const void* source, size_t count, double factor);
void scale_from_float32(DType dtype, void* destination, const float* source, size_t count, double factor);

}  // namespace ronde
