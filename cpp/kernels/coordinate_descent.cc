#include "kernels/coordinate_descent.h"

#include <algorithm>
#include <cmath>

namespace ronde {
namespace {

// Returns the derivative along coordinate j; at a kink, the least of its subgradients.
double slope(const PenalizedQuadratic& point, size_t j) {
  const double gradient = point.gradient[j], penalty = point.penalties[j];
  if (point.w[j] != 0) return gradient + std::copysign(penalty, point.w[j]);
  return gradient - std::clamp(gradient, -penalty, penalty);
}

void descend_one(const PenalizedQuadratic& point, size_t j) {
  const double* row = point.matrix + j * point.size;
  if (!(row[j] > 0)) return;
  const double target = row[j] * point.w[j] - point.gradient[j], penalty = point.penalties[j];
  const double next = (target - std::clamp(target, -penalty, penalty)) / row[j];
  const double move = next - point.w[j];
  point.w[j] = next;
  for (size_t k = 0; k < point.size; ++k) point.gradient[k] += move * row[k];
}

}  // namespace

size_t descend_coordinates(const PenalizedQuadratic& point, double tolerance, size_t max_passes) {
  for (size_t pass = 0; pass < max_passes; ++pass) {
    double largest = 0;
    for (size_t j = 0; j < point.size; ++j)
      if (point.matrix[j * point.size + j] > 0) largest = std::max(largest, std::abs(slope(point, j)));
    if (!(largest > tolerance)) return pass;
    for (size_t j = 0; j < point.size; ++j)
      if (slope(point, j) != 0) descend_one(point, j);
  }
  return max_passes;
}

}  // namespace ronde
