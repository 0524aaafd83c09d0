// What a reduction does to the elements.
#pragma once

#include <cstddef>

#include "types.h"

namespace ronde {

// It can differ from what the Call says: in a hierarchical all-reduce that averages, the ranks of a host only sum; the
// last stage, between the hosts, divides by the number of all ranks. And between its stages the sums of 16-bit floats
// are float32 numbers: the first has them as `result`, the last as `dtype`.
struct Reduction {
  DType dtype;  // of what is combined
  ReduceOp op;
  int divisor;           // of kAverage
  DType result = dtype;  // another one only between a 16-bit float and float32

  size_t item_bytes() const { return size_of(dtype); }
  size_t result_bytes() const { return size_of(result); }
};

// The same for some of the ranks only, whose result is combined with others: nothing is divided yet.
constexpr Reduction part_of(Reduction reduction) {
  if (reduction.op == ReduceOp::kAverage) reduction.op = ReduceOp::kSum;
  return reduction;
}

constexpr bool is_small_float(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBfloat16; }

// The type in which algorithms pass on what they have combined so far: float32 for sums and products of 16-bit floats,
// which are rounded once, at the end.
constexpr DType partial_type(DType dtype, ReduceOp op) {
  const bool rounds = op == ReduceOp::kSum || op == ReduceOp::kAverage || op == ReduceOp::kProduct;
  return is_small_float(dtype) && rounds ? DType::kFloat32 : dtype;
}

// Whether a reduction cannot be passed on in parts at all: the sum of integers that an average divides may need more
// bits than their type has.
constexpr bool needs_all_at_once(DType dtype, ReduceOp op) { return op == ReduceOp::kAverage && is_integer(dtype); }

}  // namespace ronde
