#include "kernels/topic_inference.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/reduce_kernels.h"

namespace ronde {
namespace {

constexpr double kFixedPoint = 1 << 20;  // of sums
constexpr double kLeast = 1e-300;

class DocumentInference {
 public:
  explicit DocumentInference(const TopicInference& inference)
      : all_(inference),
        kernels_(*available_kernels().front()->topics),
        rows_(inference.stride / kTopicLanes),
        shares_(inference.stride),
        sums_(inference.stride) {}

  void infer(const Documents& documents, size_t row, double* gamma, int64_t* statistics) {
    const int64_t begin = documents.offsets[row], end = documents.offsets[row + 1];
    double occurrences = 0;
    for (int64_t entry = begin; entry < end; ++entry) occurrences += documents.counts[entry];
    for (size_t k = 0; k < all_.topics; ++k) gamma[k] = all_.priors[k] + occurrences / static_cast<double>(all_.topics);
    set_shares(gamma);
    for (size_t iteration = 0; iteration < all_.max_iterations; ++iteration)
      if (iterate(documents, begin, end, gamma) < all_.tolerance) break;
    if (statistics != nullptr) add_statistics(documents, begin, end, statistics);
  }

 private:
  const double* weights_of(const Documents& documents, int64_t entry) const {
    return all_.weights + static_cast<size_t>(documents.words[entry]) * all_.stride;
  }

  // Returns the mean change of gamma.
  double iterate(const Documents& documents, int64_t begin, int64_t end, double* gamma) {
    std::fill(sums_.begin(), sums_.end(), 0.0);
    for (int64_t entry = begin; entry < end; ++entry) {
      const double* const own = weights_of(documents, entry);
      const double all = kernels_.dot(own, shares_.data(), rows_);
      kernels_.add_scaled(sums_.data(), own, documents.counts[entry] / std::max(all, kLeast), rows_);
    }
    double change = 0;
    for (size_t k = 0; k < all_.topics; ++k) {
      const double next = all_.priors[k] + shares_[k] * sums_[k];
      change += std::abs(next - gamma[k]);
      gamma[k] = next;
    }
    set_shares(gamma);
    return change / static_cast<double>(all_.topics);
  }

  // A common factor has no effect.
  void set_shares(const double* gamma) {
    if (!all_.is_variational) {
      std::copy(gamma, gamma + all_.topics, shares_.begin());
      return;
    }
    for (size_t k = 0; k < all_.topics; ++k) shares_[k] = std::max(exp_digamma(gamma[k]), kLeast);
  }

  // exp(digamma(x)) of a shifted argument, whose logarithm and exponential cancel.
  static double exp_digamma(double x) {
    double shift = 0;
    for (; x < 8; x += 1) shift -= 1 / x;
    const double inverse = 1 / x, square = inverse * inverse;
    const double series =
        square * (1.0 / 12 - square * (1.0 / 120 - square * (1.0 / 252 - square * (1.0 / 240 - square / 132))));
    return x * portable_exp(shift - inverse / 2 - series);
  }

  // For numbers up to 0.
  static double portable_exp(double x) {
    if (x < -690) return 0;
    const double whole = std::floor(x * 1.4426950408889634 + 0.5);
    const double rest = (x - whole * 0.693147180369123816490) - whole * 1.90821492927058770002e-10;
    double series = 1;
    for (int power = 13; power > 0; --power) series = 1 + series * rest / power;
    return std::ldexp(series, static_cast<int>(whole));
  }

  void add_statistics(const Documents& documents, int64_t begin, int64_t end, int64_t* statistics) const {
    for (int64_t entry = begin; entry < end; ++entry) {
      const double* const own = weights_of(documents, entry);
      int64_t* const sums = statistics + static_cast<size_t>(documents.words[entry]) * all_.topics;
      const double all = kernels_.dot(own, shares_.data(), rows_);
      const double factor = documents.counts[entry] / std::max(all, kLeast) * kFixedPoint;
      for (size_t k = 0; k < all_.topics; ++k) sums[k] += static_cast<int64_t>(own[k] * shares_[k] * factor + 0.5);
    }
  }

  const TopicInference& all_;
  const TopicKernels& kernels_;
  size_t rows_;
  std::vector<double> shares_, sums_;  // stride
};

}  // namespace

void infer_topics(const TopicInference& inference, const Documents& documents, double* gammas, int64_t* statistics) {
  DocumentInference document(inference);
  for (size_t row = 0; row < documents.row_count; ++row)
    document.infer(documents, row, gammas + row * inference.topics, statistics);
}

}  // namespace ronde
