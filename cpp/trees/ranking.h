// Derivatives of LambdaRank: rows are ranked within groups, and a pair of rows in the wrong order counts as much as the
// normalized discounted cumulative gain (NDCG) of its group rises when the two change places.
//
// A group is given as a whole, so its derivatives do not depend on the tasks that have its rows. Rows of equal scores
// are ranked by their places.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ronde {

class Crew;

struct RankedGroups {
  const double* y;        // row_count: relevances, whole numbers from 0 to 31; the gain is 2^y - 1
  const double* scores;   // row_count
  const int64_t* starts;  // group_count + 1: where the groups begin, and where the last one ends
  size_t group_count;
  size_t truncation;  // pairs count if one of them has such a rank from 0, or a better one; the NDCG ends there
};

// Fills `gradients` and `hessians` (row_count), and `losses` (group_count) with 1 - NDCG: 0 of a group without gain.
void derive_ranking(const RankedGroups& groups, double* gradients, double* hessians, double* losses, Crew& crew);

}  // namespace ronde
