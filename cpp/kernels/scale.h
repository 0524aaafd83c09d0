// Multiplies by a factor, as an all-reduce does before and after the sum.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace ronde {

// destination[i] = source[i] * factor. 16-bit floats are multiplied in float32 and keep the payload of a NaN. Bool does
// not change. Both may be the same memory but must not overlap otherwise. The factor 1 copies.
//
// Integers: where x and the product are below 2^53, the product is that of float64; larger ones are exact. It is
// rounded towards zero and wraps around, as sums do. A factor that is not finite gives 0.
void scale(DType dtype, void* destination, const void* source, size_t count, double factor);

// The same from a 16-bit type to float32, and from float32 to a 16-bit type with one rounding. The memory differs.
void scale_to_float32(DType dtype, float* destination, const void* source, size_t count, double factor);
void scale_from_float32(DType dtype, void* destination, const float* source, size_t count, double factor);

}  // namespace ronde
