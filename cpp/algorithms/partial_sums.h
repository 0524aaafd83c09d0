// Wider types for algorithms that forward partial sums of 16-bit floats. A 16-bit sum rounded at every hop differs from
// the sum in float32, and it can overflow where the average does not.
#pragma once

#include <cstddef>

#include "base/scratch.h"
#include "kernels/reduce.h"
#include "kernels/reduction.h"

namespace ronde {

// Calls run(reduction, in, out) with a type that has room for partial sums: the given one, or float32 in `partials`
// (twice the memory, and twice the bytes between ranks), rounded once at the end.
template <class Run>
void with_partial_sums(const Reduction& reduction, const void* in, void* out, size_t count, Scratch& partials,
                       Run&& run) {
  const DType wide = partial_type(reduction.dtype, reduction.op);
  if (wide == reduction.dtype) return run(reduction, in, out);
  void* const sums = partials.get(count * size_of(wide));
  reduce({reduction.dtype, ReduceOp::kSum, 1, wide}, sums, &in, 1, count);
  run(Reduction{wide, reduction.op, reduction.divisor}, sums, sums);
  const void* const complete = sums;
  reduce({wide, ReduceOp::kSum, 1, reduction.dtype}, out, &complete, 1, count);
}

}  // namespace ronde
