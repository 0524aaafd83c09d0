#include "trees/leaves.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "trees/crew.h"

namespace ronde {
namespace {

// Integers in the order of the numbers.
uint64_t order_of(double number) {
  const auto bits = std::bit_cast<uint64_t>(number + 0.0);  // -0 becomes 0
  return bits >> 63 != 0 ? ~bits : bits | uint64_t{1} << 63;
}

template <class Body>
void for_rows(const LeafRows& leaves, size_t leaf, Body&& body) {
  for (int64_t place = leaves.places[2 * leaf]; place < leaves.places[2 * leaf + 1]; ++place) {
    body(leaves.permutation[place]);
  }
}

}  // namespace

void sum_leaves(const LeafRows& leaves, const double* gradients, const double* hessians, size_t score_count,
                size_t column, double gradient_scale, double hessian_scale, int64_t* sums, Crew& crew) {
  crew.run(leaves.leaf_count, [&](size_t leaf) {
    int64_t gradient = 0, hessian = 0;
    for_rows(leaves, leaf, [&](size_t row) {
      if (leaves.integers[row] == 0) return;
      gradient += std::llrint(gradients[row * score_count + column] * gradient_scale);
      hessian += std::llrint(hessians[row * score_count + column] * hessian_scale);
    });
    sums[2 * leaf] = gradient;
    sums[2 * leaf + 1] = hessian;
  });
}

void add_values(const LeafRows& leaves, const double* values, double* scores, size_t score_count, size_t column,
                Crew& crew) {
  crew.run(leaves.leaf_count, [&](size_t leaf) {
    for_rows(leaves, leaf, [&](size_t row) { scores[row * score_count + column] += values[leaf]; });
  });
}

void count_bytes(const LeafRows& leaves, const double* y, const double* scores, const int64_t* weights,
                 const uint64_t* prefixes, int shift, int64_t* counts, Crew& crew) {
  crew.run(leaves.leaf_count, [&](size_t leaf) {
    for_rows(leaves, leaf, [&](size_t row) {
      if (leaves.integers[row] == 0) return;
      const uint64_t order = order_of(y[row] - scores[row]);
      if (shift < 56 && order >> (shift + 8) != prefixes[leaf]) return;
      counts[leaf * 256 + ((order >> shift) & 255)] += weights == nullptr ? 1 : weights[row];
    });
  });
}

}  // namespace ronde
