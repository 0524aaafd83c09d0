// SHAP values: how much each column adds to the prediction of a row, by Shapley's rule.
//
// Where a row's value is unknown, it goes both ways, in proportion to the rows that the fit had there (path-dependent,
// as in TreeSHAP: Lundberg, Erion and Lee 2018). The value of a column is the mean, over x from 0 to 1, of the change
// of the prediction by this column if each other column is known with probability x. For a leaf this is the integral of
// a product with a factor for each column on its path: a polynomial, for which a quadrature of Gauss and Legendre is
// exact. No factor is negative, so that long paths lose no precision, unlike with weights of subsets by their size.
// With d different columns on the longest path, a row and a tree take nodes x d / 2 operations.
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
