// Reductions on raw buffers: the arithmetic of the data plane. No waiting, no threads, no allocation.
//
// Kernels exist in several versions (baseline, AVX2, AVX-512, NEON); one is chosen when the library is loaded. All give
// bitwise the same result (no fused multiply-add, sums in the order of `sources`), except for the payload and sign of a
// NaN. Buffers need no alignment.
#pragma once

#include <cstddef>

#include "base/types.h"
#include "kernels/reduction.h"

namespace ronde {

// True if `op` is defined for `dtype`: order (min, max) needs real numbers, bit operations need integers or bool, and
// bool has no average. Bool behaves as in NumPy: sum and max are "or", product and min "and".
bool is_supported(DType dtype, ReduceOp op);

// destination[i] = sources[0][i] (op) sources[1][i] (op) ... in that order, for `count` elements of reduction.dtype;
// the results have the type reduction.result. kAverage finally divides the sum by the divisor (the number of ranks);
// the other operations ignore it. An average of integers sums without wrapping around and divides towards zero. 16-bit
// floats are accumulated in float32 across all sources and rounded once. NaN wins in min and max, as in NumPy. Of zeros
// of different sign, the least is negative and the greatest is not, so neither depends on the order of the sources.
// `destination` may be one of the sources if the result has their type, and must not overlap them otherwise. At least
// one source (and destination). Throws UsageError unless is_supported(dtype, op).
void reduce(const Reduction& reduction, void* destination, const void* const* sources, int source_count, size_t count);

// The same with several destinations, for reductions in symmetric memory. Each destination may be one of the sources;
// no two destinations may be equal. Reads every source once and writes every destination once.
void reduce_to_all(const Reduction& reduction, void* const* destinations, int destination_count,
                   const void* const* sources, int source_count, size_t count);

// The arithmetic of Adasum (algorithms/adasum.h), for the four real floating point types only. Both vectors have
// `count` elements.
bool has_dot_products(DType dtype);
// products[0] += a.a, products[1] += a.b, products[2] += b.b, in float64.
void add_dot_products(DType dtype, const void* a, const void* b, size_t count, double* products);
// out = weight_a a + weight_b b; `out` may be `a` or `b`. 16-bit floats are computed in float32.
void weighted_sum(DType dtype, void* out, const void* a, double weight_a, const void* b, double weight_b, size_t count);

}  // namespace ronde
