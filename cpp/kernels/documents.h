// Documents as rows of counts of words, for the inner loops of topic models.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ronde {

// A sparse matrix in CSR form: document d has the entries [offsets[d], offsets[d + 1]).
struct Documents {
  const int64_t* offsets;  // row_count + 1, from 0, not decreasing
  const int32_t* words;    // of each entry: from 0, less than the number of words
  const double* counts;    // of each entry: finite and not negative
  size_t row_count;
};

}  // namespace ronde
