#include "trees/binned_rows.h"

#include <algorithm>
#include <cmath>

#include "trees/crew.h"

namespace ronde {
namespace {

constexpr size_t kRowsBinnedAtOnce = 4096;

// Returns how many of the ascending values are less than `value`, without branches that depend on it.
size_t count_below(const double* values, size_t count, double value) {
  const double* first = values;
  while (count > 1) {
    const size_t half = count / 2;
    first = first[half - 1] < value ? first + half : first;
    count -= half;
  }
  return static_cast<size_t>(first - values) + (count == 1 && *first < value);
}

uint8_t bin_of(const double* values, size_t count, bool is_categorical, double value) {
  if (std::isnan(value) || (is_categorical && value < 0)) return static_cast<uint8_t>(count + (is_categorical ? 0 : 1));
  const size_t below = count_below(values, count, value);
  if (is_categorical && (below == count || values[below] != value)) return static_cast<uint8_t>(count);
  return static_cast<uint8_t>(below);
}

template <class T>
void bin_some(const T* rows, size_t begin, size_t end, size_t row_count, size_t column_count, const Bins& by,
              uint8_t* bins) {
  const ColumnGroups groups = groups_of(column_count);
  for (size_t column = 0; column < groups.count * groups.width; ++column) {
    uint8_t* to = bins + column / groups.width * row_count * groups.width + column % groups.width;
    if (column >= column_count) {
      for (size_t row = begin; row < end; ++row) to[row * groups.width] = 0;
      continue;
    }
    const double* values = by.values + by.starts[column];
    const auto count = static_cast<size_t>(by.starts[column + 1] - by.starts[column]);
    for (size_t row = begin; row < end; ++row) {
      to[row * groups.width] =
          bin_of(values, count, by.is_categorical[column] != 0, static_cast<double>(rows[row * column_count + column]));
    }
  }
}

}  // namespace

void bin_rows(DType dtype, const void* rows, size_t row_count, size_t column_count, const Bins& by, uint8_t* bins,
              Crew& crew) {
  crew.run((row_count + kRowsBinnedAtOnce - 1) / kRowsBinnedAtOnce, [&](size_t part) {
    const size_t begin = part * kRowsBinnedAtOnce, end = std::min(row_count, begin + kRowsBinnedAtOnce);
    if (dtype == DType::kFloat32) {
      bin_some(static_cast<const float*>(rows), begin, end, row_count, column_count, by, bins);
    } else {
      bin_some(static_cast<const double*>(rows), begin, end, row_count, column_count, by, bins);
    }
  });
}

}  // namespace ronde
