#include "trees/gradients.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "trees/crew.h"

namespace ronde {
namespace {

constexpr uint64_t kMostBlockRows = 8191;
constexpr double kMostInteger = 1 << 24;
constexpr double kEnoughForNearest = 1 << 14;
constexpr size_t kRowsAtOnce = 8192;

struct Derivatives {
  double loss, gradient, hessian;
};

Derivatives derive_one(Loss loss, double parameter, double y, double score) {
  switch (loss) {
    case Loss::kAbsolute:
      return {std::abs(score - y), score < y ? -1.0 : 1.0, 1.0};
    case Loss::kQuantile:
      return score < y ? Derivatives{parameter * (y - score), -parameter, 1.0}
                       : Derivatives{(1 - parameter) * (score - y), 1 - parameter, 1.0};
    case Loss::kPoisson: {
      const double mean = std::exp(score);
      return {mean - y * score, mean - y, mean};
    }
    case Loss::kGamma: {
      const double ratio = y * std::exp(-score);
      return {score + ratio, 1 - ratio, ratio};
    }
    case Loss::kLogistic: {
      const double small = std::exp(-std::abs(score));
      const double probability = (score < 0 ? small : 1.0) / (1 + small);
      return {std::log1p(small) + std::max(score, 0.0) - y * score, probability - y,
              small / ((1 + small) * (1 + small))};
    }
    case Loss::kHuber: {
      const double error = score - y, size = std::abs(error);
      if (size <= parameter) return {error * error / 2, error, 1.0};
      return {parameter * (size - parameter / 2), std::copysign(parameter, error), 1.0};
    }
    case Loss::kTweedie: {
      const double left = 1 - parameter, right = 2 - parameter;
      const double target = y * std::exp(left * score), mean = std::exp(right * score);
      return {mean / right - target / left, mean - target, right * mean - left * target};
    }
    default:
      return {(score - y) * (score - y) / 2, score - y, 1.0};
  }
}

// Returns the loss.
double derive_softmax(const double* scores, size_t count, double y, double weight, double* gradients,
                      double* hessians) {
  const double largest = *std::max_element(scores, scores + count);
  double sum = 0;
  for (size_t k = 0; k < count; ++k) sum += gradients[k] = std::exp(scores[k] - largest);
  const auto target = static_cast<size_t>(y);
  for (size_t k = 0; k < count; ++k) {
    const double probability = gradients[k] / sum;
    gradients[k] = weight * (probability - (k == target ? 1 : 0));
    hessians[k] = weight * probability * (1 - probability);
  }
  return std::log(sum) + largest - scores[target];
}

void derive_block(const LossRows& rows, size_t begin, size_t end, double* gradients, double* hessians, double* losses) {
  losses[0] = losses[1] = 0;
  for (size_t row = begin; row < end; ++row) {
    const double weight = rows.weights == nullptr ? 1 : rows.weights[row];
    const bool is_held = rows.is_held != nullptr && rows.is_held[row] != 0;
    double* gradient = gradients + row * rows.score_count;
    double* hessian = hessians + row * rows.score_count;
    const double* scores = rows.scores + row * rows.score_count;
    double loss;
    if (rows.loss == Loss::kSoftmax) {
      loss = derive_softmax(scores, rows.score_count, rows.y[row], weight, gradient, hessian);
    } else {
      const Derivatives at = derive_one(rows.loss, rows.parameter, rows.y[row], *scores);
      loss = at.loss;
      *gradient = weight * at.gradient;
      *hessian = weight * at.hessian;
    }
    losses[is_held ? 1 : 0] += weight * loss;
    if (is_held || weight == 0) {
      std::fill_n(gradient, rows.score_count, 0.0);
      std::fill_n(hessian, rows.score_count, 0.0);
    }
  }
}

double rounded(double number, double most, uint64_t random, bool is_random) {
  const double addend = is_random ? static_cast<double>(random & 0xffffffffu) * 0x1p-32 : 0.5;
  return std::clamp(std::floor(number + addend), -most, most);
}

}  // namespace

void derive(const LossRows& rows, const int64_t* block_starts, size_t block_count, double* gradients, double* hessians,
            double* losses, Crew& crew) {
  crew.run(block_count, [&](size_t block) {
    derive_block(rows, static_cast<size_t>(block_starts[block]), static_cast<size_t>(block_starts[block + 1]),
                 gradients, hessians, losses + 2 * block);
  });
}

Packing Packing::of(uint64_t row_count) {
  const uint64_t block = std::clamp<uint64_t>(row_count, 1, kMostBlockRows);
  Packing packing{};
  packing.block_rows = block;
  packing.count_bits = std::bit_width(block);
  packing.hessian_bits = (64 - packing.count_bits) / 2;
  const int gradient_bits = 64 - packing.count_bits - packing.hessian_bits;
  // The sums of a whole histogram have the hessian and the count in one number of 64 bits.
  const double whole = std::ldexp(1.0, 62 - std::bit_width(row_count)) / static_cast<double>(row_count + 1);
  const auto rows = static_cast<double>(block);
  packing.most_hessian =
      std::floor(std::min({(std::ldexp(1.0, packing.hessian_bits) - 1) / rows, std::max(whole, 1.0), kMostInteger}));
  packing.most_gradient = std::floor(std::min((std::ldexp(1.0, gradient_bits - 1) - 1) / rows, kMostInteger));
  packing.is_random = std::min(packing.most_gradient, packing.most_hessian) < kEnoughForNearest;
  return packing;
}

void pack(const Packed& rows, const Packing& packing, int64_t* integers, Crew& crew) {
  crew.run((rows.row_count + kRowsAtOnce - 1) / kRowsAtOnce, [&](size_t part) {
    const size_t end = std::min(rows.row_count, (part + 1) * kRowsAtOnce);
    for (size_t row = part * kRowsAtOnce; row < end; ++row) {
      if ((rows.is_out != nullptr && rows.is_out[row] != 0) || (rows.weights != nullptr && rows.weights[row] == 0)) {
        integers[row] = 0;
        continue;
      }
      const size_t place = row * rows.score_count + rows.column;
      const uint64_t random = packing.is_random ? mixed(rows.seed, rows.first_row + row) : 0;
      const double gradient =
          rounded(rows.gradients[place] * rows.gradient_scale, packing.most_gradient, random, packing.is_random);
      const double hessian =
          rounded(rows.hessians[place] * rows.hessian_scale, packing.most_hessian, random >> 32, packing.is_random);
      integers[row] = static_cast<int64_t>(
          (static_cast<uint64_t>(static_cast<int64_t>(gradient)) << (packing.count_bits + packing.hessian_bits)) +
          (static_cast<uint64_t>(hessian) << packing.count_bits) + 1);
    }
  });
}

}  // namespace ronde
