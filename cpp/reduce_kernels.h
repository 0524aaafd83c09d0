// Private to reduce.cc, reduce_kernels.cc and their test: the kernels of one instruction set.
#pragma once

#include <cstddef>
#include <span>

#include "types.h"

namespace ronde {

// reduce_to_all() for one dtype and one operation.
using Kernel = void (*)(void* const* destinations, int destination_count, const void* const* sources, int source_count,
                        size_t count, int divisor);

struct Kernels {
  const char* instruction_set;
  Kernel table[kDTypeCount][kReduceOpCount];  // nullptr: the operation has no meaning for the dtype
};

// What this machine can run, the best first. Never empty; each gives the same results.
std::span<const Kernels* const> available_kernels();

}  // namespace ronde
