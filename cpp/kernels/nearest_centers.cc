#include "kernels/nearest_centers.h"

#include <string>

#include "base/error.h"
#include "base/scratch.h"
#include "kernels/reduce_kernels.h"

namespace ronde {

double assign_to_centers(const CenterAssignment& assignment) {
  if (assignment.dtype != DType::kFloat32 && assignment.dtype != DType::kFloat64) {
    throw UsageError(std::string("rows of ") + name_of(assignment.dtype) + ": expected float32 or float64");
  }
  const CenterKernels& kernels = *available_kernels().front()->centers;
  const CenterKernel kernel = assignment.dtype == DType::kFloat32 ? kernels.float32 : kernels.float64;
  Scratch scratch;
  return kernel(assignment, scratch.get(kernels.tile_bytes * assignment.center_count));
}

}  // namespace ronde
