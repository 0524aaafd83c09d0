// Private to reduce.cc, the *_kernels.cc and their tests: the kernels of one instruction set.
#pragma once

#include <cstddef>
#include <span>

#include "types.h"

namespace ronde {

// reduce_to_all() for one dtype and one operation.
using Kernel = void (*)(void* const* destinations, int destination_count, const void* const* sources, int source_count,
                        size_t count, int divisor);

// add_dot_products() and weighted_sum() for one dtype; see adasum_kernels.cc.
using DotKernel = void (*)(const void* a, const void* b, size_t count, double* products);
using WeightedSumKernel = void (*)(void* out, const void* a, double weight_a, const void* b, double weight_b,
                                   size_t count);

struct AdasumKernels {
  DotKernel dot[kDTypeCount];  // nullptr: not for this dtype
  WeightedSumKernel weighted_sum[kDTypeCount];
};

struct Kernels {
  const char* instruction_set;
  const AdasumKernels* adasum;
  Kernel table[kDTypeCount][kReduceOpCount];  // nullptr: the operation has no meaning for the dtype
  // Of 16-bit floats, by their type: the result is float32, or the sources are.
  Kernel widening[kDTypeCount][kReduceOpCount];
  Kernel narrowing[kDTypeCount][kReduceOpCount];
};

// What this machine can run, the best first. Never empty; each gives the same results.
std::span<const Kernels* const> available_kernels();

}  // namespace ronde
