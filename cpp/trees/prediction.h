// Predictions of trees for binned rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "trees/binned_rows.h"

namespace ronde {

// The nodes of all trees, one tree after the other; children come after their parents.
struct Trees {
  const int32_t* column;  // -1: a leaf
  const int32_t* bin;
  const int32_t* left;  // from the root of the tree
  const uint8_t* missing_left;
  const uint64_t* categories;  // x 4
  const double* values;        // node_count x value_count
  size_t node_count;
  size_t value_count;
  const int64_t* roots;   // tree_count + 1: where the trees begin, and where the last one ends
  const int32_t* scores;  // tree_count: the first of the scores that the tree adds its values to
  size_t tree_count;
};

// Returns whether the trees are such that predict() ends and stays within its arrays.
bool are_sound(const Trees& trees, size_t column_count, size_t score_count);

// Adds the values of the rows' leaves to `scores` (row_count x score_count), tree by tree, in order.
void predict(const Trees& trees, const BinnedRows& rows, const Bins& bins, double* scores, size_t score_count,
             Crew& crew);

// Fills `leaves` (row_count x tree_count) with the numbers of the rows' leaves, counted from the root of each tree.
void find_leaves(const Trees& trees, const BinnedRows& rows, const Bins& bins, int32_t* leaves, Crew& crew);

}  // namespace ronde
