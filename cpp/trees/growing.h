// Growth of one tree: the leaf whose split gains most is split next.
//
// Every task has some of the rows and calls grow_tree(); histograms are sums of integers (gradients.h) over the rows of
// all tasks, so that all tasks make the same tree, bit for bit, whatever their number and that of threads. Of the two
// parts of a split leaf only the smaller one gets its histograms from the rows; those of the other are a difference.
// The rows of a leaf are next to each other in a permutation of the rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "trees/binned_rows.h"
#include "trees/gradients.h"

namespace ronde {

// Adds up the integers of all tasks, in place. May throw.
using SumOverTasks = std::function<void(int64_t* numbers, size_t count)>;

struct TreeRules {
  size_t most_leaves;    // at least 2
  size_t most_depth;     // of a leaf
  int64_t least_rows;    // of a leaf
  double least_hessian;  // of a leaf
  double least_gain;     // a split needs more
  double l1;
  double l2;
  size_t columns_of_node;  // how many columns, drawn for each node, a split may use
  bool is_extra_random;    // whether each column offers one random border only
  uint64_t seed;
  const int8_t* monotone;  // column_count: the sign of the slope; nullptr: any
  // Columns that may be on one path from the root to a leaf together. A path whose columns are all in some groups goes
  // on with the columns of these.
  const int64_t* group_starts;   // group_count + 1; nullptr: all columns may be together
  const int32_t* group_columns;  // of each group, ascending; every column is in a group
  size_t group_count;
};

struct TreeRows {
  BinnedRows rows;
  const Bins& bins;
  const int64_t* integers;  // row_count
  Packing packing;
  double gradient_scale;
  double hessian_scale;
  uint64_t rows_of_all_tasks;
};

// The nodes of a tree, in arrays with room for 2 * most_leaves - 1. Node 0 is the root.
struct TreeNodes {
  int32_t* column;        // -1: a leaf
  int32_t* bin;           // of a column of numbers: rows with this bin or a lower one go left
  int32_t* left;          // the other part of the rows is in the next node
  uint8_t* missing_left;  // whether rows with a missing value go left
  uint64_t* categories;   // x 4: the bits of the categories that go left
  double* gain;           // by which the split lowers the loss, twice
  int64_t* count;         // rows of all tasks that count
  double* bounds;         // x 2: between which the value of a leaf has to be
  int64_t* rows;          // x 2: from which to which place the permutation has the rows of the node
};

// Fills the nodes and `permutation` (row_count). Returns the number of nodes.
size_t grow_tree(const TreeRows& rows, const TreeRules& rules, const SumOverTasks& sum_over_tasks,
                 const TreeNodes& nodes, uint32_t* permutation, Crew& crew);

}  // namespace ronde
