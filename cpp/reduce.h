// Reductions on raw buffers: the arithmetic of the data plane. No waiting, no threads, no allocation.
//
// Kernels exist in several versions (baseline, AVX2, AVX-512) chosen once at run time; all give bitwise the same result
// (no fused multiply-add, sums in the order of `sources`), save for the payload and sign of a NaN. Buffers need no
// alignment.
#pragma once

#include <cstddef>

#include "types.h"

namespace ronde {

// True if `op` makes sense for `dtype`: averages need floating point or complex numbers, order (min, max) needs real
// ones, bit operations need integers or bool. Bool behaves as in NumPy: sum and max are "or", product and min "and".
bool is_supported(DType dtype, ReduceOp op);

// destination[i] = sources[0][i] (op) sources[1][i] (op) ... in that order, for `count` elements.
// With kAverage the sum is divided by `divisor` (the number of ranks) at the end; the other operations ignore it.
// 16-bit floats are accumulated in float32 across all sources and rounded once. NaN wins in min and max, as in NumPy.
// `destination` may be equal to any one of the sources, or overlap none of them. At least one source (and destination).
// Throws UsageError unless is_supported(dtype, op).
void reduce(DType dtype, ReduceOp op, void* destination, const void* const* sources, int source_count, size_t count,
            int divisor);

// The same, with the result written to several destinations (each of which may be equal to any of the sources, no two
// to each other): what reducing in symmetric memory needs. Every source is read once, every destination written once.
void reduce_to_all(DType dtype, ReduceOp op, void* const* destinations, int destination_count,
                   const void* const* sources, int source_count, size_t count, int divisor);

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
