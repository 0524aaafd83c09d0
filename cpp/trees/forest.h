// Growth of the trees of a forest, each by one thread, from rows that a task has as a whole.
//
// A tree takes a sample of the rows: how often a row is drawn depends on a seed and on what the row contains, not on
// where it is. So a row that is there twice counts as one with twice the weight. Histograms are sums of integers, and
// are formed for the columns that a node draws. A node of few rows visits only the bins that they have. A random border
// needs none: only the sums of the rows on one side.
// Unlike the trees of boosting (growing.h), those of a forest are deep and have many small nodes, so that neither
// differences of histograms nor several threads in one tree would pay.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "trees/binned_rows.h"

namespace ronde {

class Crew;

// Keep the numbers: ronde/ml/trees/forests.py has them, too.
enum class Criterion : int { kGini = 0, kEntropy = 1, kSquared = 2 };

// Which rows a tree takes, and how often. Row r stands for repeats[r] equal ones, which are those numbered from
// firsts[r] among all with its identity.
struct Draws {
  const uint64_t* identities;  // row_count: the hash of what a row contains
  const uint32_t* firsts;      // row_count
  const uint32_t* repeats;     // row_count
  size_t row_count;
  double rate;  // how often each is drawn, in the mean; 0: all are taken once
};

struct ForestRows {
  const uint8_t* bins;  // column_count x row_count
  size_t row_count;     // less than 2^27
  size_t column_count;
  const Bins& by;
  Draws draws;
  const int64_t* weights;   // row_count: of one draw, above 0
  const double* y;          // row_count; classes are numbers from 0
  const int64_t* integers;  // row_count: y as an integer; nullptr for classes
  size_t class_count;       // 0 for numbers
  // column_count x kMostBins: the least and the largest value of a column in each bin. Random borders are drawn between
  // them; nullptr unless `is_extra_random`.
  const double* lows;
  const double* highs;
};

struct ForestRules {
  Criterion criterion;
  size_t most_leaves;      // 0: no limit; else the leaf that gains most is split next
  size_t most_depth;       // of a leaf
  int64_t least_rows;      // of a leaf
  int64_t least_split;     // of a node that is split
  double least_weight;     // of a leaf, as a part of the weight of all rows
  double least_decrease;   // of the impurity by a split
  double unit;             // of impurity: what an impurity of integers is multiplied by
  size_t columns_of_node;  // how many columns, drawn for each node, a split may use
  bool is_extra_random;    // whether each column offers one random border only
};

// A tree, with the nodes as of TreeNodes (growing.h).
struct ForestTree {
  std::vector<int32_t> column, bin, left;
  std::vector<uint8_t> missing_left;
  std::vector<uint64_t> categories;  // x 4
  std::vector<double> values;        // x class_count: the shares of the classes; x 1: the mean; 0 unless a leaf
  std::vector<double> gain;          // by which the split lowers the impurity, times the node's part of the weight
  std::vector<int64_t> count;        // rows
};

// Fills `identities`: for rows with equal bins the same number.
void identify_rows(const uint8_t* bins, size_t row_count, size_t column_count, uint64_t* identities, Crew& crew);

// Fills `counts` (row_count): how often a tree draws each row.
void count_draws(const Draws& draws, uint64_t seed, uint32_t* counts);

// Grows a tree for each seed. Throws std::bad_alloc.
std::vector<ForestTree> grow_forest(const ForestRows& rows, const ForestRules& rules, const uint64_t* seeds,
                                    size_t tree_count, Crew& crew);

}  // namespace ronde
