// What the leaves of a tree need of their rows: exact sums, quantiles, and the new scores.
//
// Sums of derivatives are sums of integers, too, but of as many bits as fit, so that they are exact for all purposes
// and nevertheless the same in any order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ronde {

class Crew;

// The rows of the leaves: leaf l has the rows permutation[places[2 * l]] to permutation[places[2 * l + 1]], without the
// last one.
struct LeafRows {
  const uint32_t* permutation;
  const int64_t* places;  // leaf_count x 2
  size_t leaf_count;
  const int64_t* integers;  // by row; one whose integer is 0 does not count
};

// Fills `sums` (leaf_count x 2): those of gradients and of hessians of the rows that count, each number times its scale
// and rounded. Both arrays have a number for each row and each of `score_count` scores; column `column` is meant.
void sum_leaves(const LeafRows& leaves, const double* gradients, const double* hessians, size_t score_count,
                size_t column, double gradient_scale, double hessian_scale, int64_t* sums, Crew& crew);

// Adds the value of its leaf to the score of each row, whether it counts or not.
void add_values(const LeafRows& leaves, const double* values, double* scores, size_t score_count, size_t column,
                Crew& crew);

// A step of the search for quantiles of y - score in each leaf. Numbers are ordered as integers of 64 bits (order_of).
// Of the rows that count and whose integers begin with the leaf's prefix (all bits above shift + 8), adds the weight to
// counts[leaf x 256 + the next byte].
void count_bytes(const LeafRows& leaves, const double* y, const double* scores, const int64_t* weights,
                 const uint64_t* prefixes, int shift, int64_t* counts, Crew& crew);

}  // namespace ronde
