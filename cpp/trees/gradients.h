// Derivatives of losses by the scores of rows, and their form as integers.
//
// A tree is grown from sums of integers, which are the same in any order: for any number of tasks, blocks and threads.
// An integer packs the gradient of a row, its hessian (the second derivative), and 1 if the row counts, so that one
// addition adds all three. Gradients and hessians are rounded at random, up or down, such that the mean is right; the
// random numbers depend on a seed and the number of the row. With few rows they have so many bits that the nearest
// integer will do.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/splitmix64.h"

namespace ronde {

class Crew;

// Keep the numbers: ronde/ml/trees/losses.py has them, too.
enum class Loss : int {
  kSquared = 0,   // of the score; half the square
  kAbsolute = 1,  // likewise
  kQuantile = 2,  // likewise; `parameter` is the quantile
  kPoisson = 3,   // the score is the logarithm of the mean
  kGamma = 4,     // likewise
  kLogistic = 5,  // the score is the logarithm of the odds of class 1
  kSoftmax = 6,   // a score for each class
  kHuber = 7,     // of the score; half the square up to `parameter`, from there on a line
  kTweedie = 8,   // the score is the logarithm of the mean; `parameter` is the power, between 1 and 2
};

struct LossRows {
  Loss loss;
  double parameter;
  const double* y;         // row_count; classes are numbers from 0
  const double* weights;   // row_count; nullptr: 1 each
  const uint8_t* is_held;  // row_count: 1 for a row that is held out; nullptr: none is
  const double* scores;    // row_count x score_count
  size_t row_count;
  size_t score_count;  // 1, or the number of classes
};

// Fills `gradients` and `hessians` (row_count x score_count), 0 for rows held out, and for each block of rows, given by
// the numbers of its first row and of the one behind it, the summed weighted loss of its rows, and of those held out.
void derive(const LossRows& rows, const int64_t* block_starts, size_t block_count, double* gradients, double* hessians,
            double* losses, Crew& crew);

// How a row's integer is made up: from the lowest bit, its count, its hessian, and its gradient with a sign.
struct Packing {
  size_t block_rows;  // so many integers can be added without overflow of a part
  int count_bits;
  int hessian_bits;
  double most_gradient;  // of a row, as an integer
  double most_hessian;
  bool is_random;  // how numbers are rounded

  // For so many rows of all tasks.
  static Packing of(uint64_t row_count);
};

// The integers of column `column` of gradients and hessians, both row_count x score_count. A row whose weight is 0, or
// that is held out or not chosen (`is_out`), has the integer 0.
struct Packed {
  const double* gradients;
  const double* hessians;
  const double* weights;  // nullptr: 1 each
  const uint8_t* is_out;  // nullptr: no row is
  size_t row_count;
  size_t score_count;
  size_t column;
  double gradient_scale;  // integers are the numbers times this, rounded
  double hessian_scale;
  uint64_t seed;
  uint64_t first_row;  // the number of row 0 among those of all tasks
};

void pack(const Packed& rows, const Packing& packing, int64_t* integers, Crew& crew);

// A random number for a row, the same wherever it is.
inline uint64_t mixed(uint64_t seed, uint64_t number) { return splitmix64(seed + (number + 1) * kSplitMixStep); }

}  // namespace ronde
