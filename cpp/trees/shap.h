// SHAP values: how much each column adds to the prediction of a row, by Shapley's rule.
//
// Where a row's value is unknown, it goes both ways, in proportion to the rows that the fit had there (path-dependent
// TreeSHAP: Lundberg, Erion and Lee 2018, algorithm 2). A row and a tree take leaves x depth^2 operations.
#pragma once

#include <cstddef>
#include <cstdint>

#include "trees/binned_rows.h"
#include "trees/prediction.h"

namespace ronde {

// Adds to `contributions` (row_count x score_count x (column_count + 1)) what each column adds to each score of each
// row; the last number is the mean of the trees over the rows of the fit. All of a row together are its scores.
// `counts`: of the nodes' rows, not negative.
void add_shap_values(const Trees& trees, const int64_t* counts, const BinnedRows& rows, const Bins& bins,
                     double* contributions, size_t score_count, Crew& crew);

}  // namespace ronde
