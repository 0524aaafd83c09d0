// The arithmetic of one reduction: types, operation and divisor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace ronde {

// It can differ from the Call: in a hierarchical all-reduce that averages, the ranks of a host only sum; the last
// stage, between the hosts, divides by the number of all ranks. Between the stages the sums of 16-bit floats are
// float32, which is the first stage's `result` and the last stage's `dtype`.
struct Reduction {
  DType dtype;  // of the input
  ReduceOp op;
  int divisor;           // of kAverage
  DType result = dtype;  // differs from dtype only between a 16-bit float and float32

  size_t item_bytes() const { return size_of(dtype); }
  size_t result_bytes() const { return size_of(result); }
};

// The same over some of the ranks, whose result is combined with others later: divides nothing.
constexpr Reduction part_of(Reduction reduction) {
  if (reduction.op == ReduceOp::kAverage) reduction.op = ReduceOp::kSum;
  return reduction;
}

constexpr bool is_small_float(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBfloat16; }

// The type of an algorithm's partial results: float32 for sums and products of 16-bit floats, which are rounded once,
// at the end.
constexpr DType partial_type(DType dtype, ReduceOp op) {
  const bool rounds = op == ReduceOp::kSum || op == ReduceOp::kAverage || op == ReduceOp::kProduct;
  return is_small_float(dtype) && rounds ? DType::kFloat32 : dtype;
}

// Whether a reduction has no partial results: the sum under an average of integers may need more bits than their type
// has.
constexpr bool needs_all_at_once(DType dtype, ReduceOp op) { return op == ReduceOp::kAverage && is_integer(dtype); }

// The bits of each part of the complex factor that a rank without data contributes to a product: a quiet NaN whose
// payload no computation makes. A product leaves such a factor out.
template <size_t kPartBytes>
inline constexpr auto kAbsentFactor = uint32_t{0x7fda9b5d};
template <>
inline constexpr auto kAbsentFactor<8> = uint64_t{0x7ffa9b5dc3e14f27};

}  // namespace ronde
