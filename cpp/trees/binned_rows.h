// Rows whose values are replaced by the numbers of bins, one byte each.
//
// The columns are in groups of equal width, at most kWidestGroup; a group has its bytes row by row. So the histograms
// of a group fit in the processor's first cache, whatever the number of columns. The last group may have columns that
// do not exist, with bin 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace ronde {

class Crew;

constexpr size_t kWidestGroup = 16;
constexpr size_t kMostBins = 256;  // of a column, with that of missing values

struct ColumnGroups {
  size_t count;
  size_t width;
};

// How so many columns are grouped.
constexpr ColumnGroups groups_of(size_t column_count) {
  const size_t count = (column_count + kWidestGroup - 1) / kWidestGroup;
  return {count, count == 0 ? 0 : (column_count + count - 1) / count};
}

// A view.
struct BinnedRows {
  const uint8_t* bins;  // groups x rows x width
  size_t row_count;
  size_t column_count;

  // The byte of row 0; that of row r is r * width further.
  const uint8_t* column(size_t column) const {
    const ColumnGroups groups = groups_of(column_count);
    return bins + column / groups.width * row_count * groups.width + column % groups.width;
  }
};

// How the values of each column become bins. Column c has the numbers from starts[c] to starts[c + 1] of `values`,
// ascending: for a column of numbers the largest value of each bin but the last; for one of categories the categories.
struct Bins {
  const double* values;
  const int64_t* starts;          // column_count + 1
  const uint8_t* is_categorical;  // column_count

  // How many bins column c has without that of missing values, whose number this is.
  size_t count(size_t c) const { return static_cast<size_t>(starts[c + 1] - starts[c]) + (is_categorical[c] ? 0 : 1); }
};

// Fills `bins`. `rows`: C-contiguous, row_count x column_count, kFloat32 or kFloat64. NaN is a missing value, and so is
// a category that is below 0 or not among the known ones.
void bin_rows(DType dtype, const void* rows, size_t row_count, size_t column_count, const Bins& by, uint8_t* bins,
              Crew& crew);

}  // namespace ronde
