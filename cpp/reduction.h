// What a reduction does to the elements.
#pragma once

#include <cstddef>

#include "types.h"

namespace ronde {

// It can differ from what the Call says: in a hierarchical all-reduce that averages, the ranks of a host only sum; the
// last stage, between the hosts, divides by the number of all ranks.
struct Reduction {
  DType dtype;
  ReduceOp op;
  int divisor;  // of kAverage

  size_t item_bytes() const { return size_of(dtype); }
};

}  // namespace ronde
