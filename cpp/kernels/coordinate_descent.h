// The inner loop of Lasso and ElasticNet: coordinate descent on a quadratic function with a penalty on absolute values.
#pragma once

#include <cstddef>

namespace ronde {

// A point of the function w'Aw/2 + b'w + sum of penalties[j] * |w[j]|.
struct PenalizedQuadratic {
  const double* matrix;     // A, size x size: symmetric and positive semidefinite
  const double* penalties;  // size, not negative
  double* gradient;         // Aw + b, size; stays that of w
  double* w;                // size
  size_t size;
};

// Minimizes the function along one coordinate after the other, in order. Returns the number of passes over them: when
// no component of the least subgradient is larger than the tolerance, or after `max_passes`. A coordinate without
// curvature stays as it is.
size_t descend_coordinates(const PenalizedQuadratic& point, double tolerance, size_t max_passes);

}  // namespace ronde
