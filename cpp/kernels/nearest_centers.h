// The inner loop of k-means: the nearest center of each row, and the sums of the rows of each center, in one pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace ronde {

// Rows, centers, and where the results go. Matrices are C-contiguous.
struct CenterAssignment {
  DType dtype;            // of rows and centers: kFloat32 or kFloat64
  const void* rows;       // row_count x dimensions
  const void* centers;    // center_count x dimensions
  const double* weights;  // row_count; nullptr: 1 each
  size_t row_count;
  size_t dimensions;    // at least 1
  size_t center_count;  // at least 1, less than 2^31
  // nullptr: not wanted
  double* sums;     // center_count x (dimensions + 1): of weighted rows, and of weights; added to what is there
  int32_t* labels;  // row_count: the number of the nearest center; of several the first
  double* squared_distances;  // row_count: to the nearest center
};

// Fills the results, and returns the sum of weighted squared distances.
//
// The distance is the sum of (x - c)^2 over the dimensions in order, in the type of the rows; so equal points have the
// distance 0, and near ones lose no digits. Sums are formed in the order of rows. All instruction sets give the same
// bits.
double assign_to_centers(const CenterAssignment& assignment);

}  // namespace ronde
