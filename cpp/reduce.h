// Reductions on raw buffers: the arithmetic of the data plane. No waiting, no threads, no allocation.
//
// Kernels exist in several versions (baseline, AVX2, AVX-512) chosen once at run time; all give bitwise the same result
// (no fused multiply-add, sums in the order of `sources`), save for the payload and sign of a NaN. Buffers need no
// alignment.
#pragma once

#include <cstddef>

#include "reduction.h"
#include "types.h"

namespace ronde {

// True if `op` makes sense for `dtype`: order (min, max) needs real numbers, bit operations need integers or bool, and
// there is no average of bool. Bool behaves as in NumPy: sum and max are "or", product and min "and".
bool is_supported(DType dtype, ReduceOp op);

// destination[i] = sources[0][i] (op) sources[1][i] (op) ... in that order, for `count` elements of reduction.dtype;
// the results are of reduction.result. With kAverage the sum is divided by the divisor (the number of ranks) at the
// end; the other operations ignore it. The average of integers is summed without wrapping around, and divided towards
// zero. 16-bit floats are accumulated in float32 across all sources and rounded once. NaN wins in min and max, as in
// NumPy. `destination` may be equal to any one of the sources if the result has their type, or overlap none of them. At
// least one source (and destination). Throws UsageError unless is_supported(dtype, op).
void reduce(const Reduction& reduction, void* destination, const void* const* sources, int source_count, size_t count);

// The same, with the result written to several destinations (each of which may be equal to any of the sources, no two
// to each other): what reducing in symmetric memory needs. Every source is read once, every destination written once.
void reduce_to_all(const Reduction& reduction, void* const* destinations, int destination_count,
                   const void* const* sources, int source_count, size_t count);

// What Adasum is made of (algorithms/adasum.h), for the four real floating point types and nothing else. The two
// vectors have `count` elements each.
bool has_dot_products(DType dtype);
// products[0] += a.a, products[1] += a.b, products[2] += b.b, in float64.
void add_dot_products(DType dtype, const void* a, const void* b, size_t count, double* products);
// out = weight_a a + weight_b b; `out` may be either of them. 16-bit floats are computed in float32.
void weighted_sum(DType dtype, void* out, const void* a, double weight_a, const void* b, double weight_b, size_t count);

// The chosen instruction set: "avx512", "avx2", "neon" or "baseline".
const char* instruction_set();

}  // namespace ronde
