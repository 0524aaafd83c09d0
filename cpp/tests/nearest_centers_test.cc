// Compares every kernel of every instruction set of this machine with a plain scalar computation, bit by bit.
#include "kernels/nearest_centers.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "base/error.h"
#include "base/scratch.h"
#include "check.h"
#include "kernels/reduce_kernels.h"

namespace ronde {
namespace {

std::mt19937_64 generator(20261123);

template <class T>
constexpr DType kDType = sizeof(T) == sizeof(float) ? DType::kFloat32 : DType::kFloat64;

struct Results {
  std::vector<double> sums;
  std::vector<int32_t> labels;
  std::vector<double> squared_distances;
  double inertia;
  bool operator==(const Results&) const = default;
};

// Exactly as many elements as there are, so that AddressSanitizer detects accesses behind them.
template <class T>
struct Case {
  size_t row_count, dimensions, center_count;
  std::vector<T> rows, centers;
  std::vector<double> weights;

  Case(size_t row_count, size_t dimensions, size_t center_count)
      : row_count(row_count),
        dimensions(dimensions),
        center_count(center_count),
        rows(row_count * dimensions),
        centers(center_count * dimensions),
        weights(row_count) {
    // Small whole numbers in some cases: there are rows as near to one center as to another.
    const double scale = generator() % 2 ? 1 : 1.37;
    std::uniform_int_distribution<int> number(-3, 3);
    for (T& x : rows) x = static_cast<T>(number(generator) * scale);
    for (T& c : centers) c = static_cast<T>(number(generator) * scale);
    for (double& weight : weights) weight = 0.3 * (number(generator) + 3);
  }

  CenterAssignment assignment(Results& results, bool is_weighted) const {
    results.sums.assign(center_count * (dimensions + 1), 0.5);
    results.labels.assign(row_count, -1);
    results.squared_distances.assign(row_count, -1);
    return {kDType<T>,
            rows.data(),
            centers.data(),
            is_weighted ? weights.data() : nullptr,
            row_count,
            dimensions,
            center_count,
            results.sums.data(),
            results.labels.data(),
            results.squared_distances.data()};
  }

  Results expected(bool is_weighted) const {
    Results results;
    (void)assignment(results, is_weighted);
    results.inertia = 0;
    for (size_t i = 0; i < row_count; ++i) {
      T nearest = 0;
      for (size_t c = 0; c < center_count; ++c) {
        T distance = 0;
        for (size_t j = 0; j < dimensions; ++j) {
          const T difference = rows[i * dimensions + j] - centers[c * dimensions + j];
          distance += difference * difference;
        }
        if (c == 0 || distance < nearest) {
          nearest = distance;
          results.labels[i] = static_cast<int32_t>(c);
        }
      }
      const double weight = is_weighted ? weights[i] : 1;
      double* sums = &results.sums[static_cast<size_t>(results.labels[i]) * (dimensions + 1)];
      for (size_t j = 0; j < dimensions; ++j) sums[j] += weight * static_cast<double>(rows[i * dimensions + j]);
      sums[dimensions] += weight;
      results.squared_distances[i] = static_cast<double>(nearest);
      results.inertia += weight * static_cast<double>(nearest);
    }
    return results;
  }
};

double run(const Kernels& kernels, const CenterAssignment& assignment) {
  Scratch scratch;
  const CenterKernel kernel = assignment.dtype == DType::kFloat32 ? kernels.centers->float32 : kernels.centers->float64;
  return kernel(assignment, scratch.get(kernels.centers->tile_bytes * assignment.center_count));
}

template <class T>
void test_all_kernels() {
  for (const size_t dimensions : {1, 2, 20, 64, 65, 200}) {  // 64 features at once
    for (const size_t centers : {1, 2, 3, 8, 17}) {
      for (const size_t rows : {0, 1, 7, 64, 131}) {
        const Case<T> data(rows, dimensions, centers);
        for (const bool is_weighted : {false, true}) {
          const Results expected = data.expected(is_weighted);
          for (const Kernels* kernels : available_kernels()) {
            Results results;
            results.inertia = run(*kernels, data.assignment(results, is_weighted));
            CHECK(results == expected);
          }
        }
      }
    }
  }
}

void test_results_that_are_not_wanted() {
  const Case<double> data(50, 3, 4);
  Results results;
  CenterAssignment assignment = data.assignment(results, false);
  const double inertia = assign_to_centers(assignment);
  assignment.sums = nullptr;
  assignment.labels = nullptr;
  assignment.squared_distances = nullptr;
  CHECK(assign_to_centers(assignment) == inertia);
}

// Nothing is nearest to a NaN: its row gets the first center, and a row at an infinite distance from all, too.
void test_numbers_without_a_distance() {
  const double kNan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> rows{kNan, 1e200, 2}, centers{0, 1, 2};
  for (const Kernels* kernels : available_kernels()) {
    std::vector<int32_t> labels(3, -1);
    const double inertia = run(
        *kernels, {DType::kFloat64, rows.data(), centers.data(), nullptr, 3, 1, 3, nullptr, labels.data(), nullptr});
    CHECK(std::isnan(inertia));
    CHECK((labels == std::vector<int32_t>{0, 0, 2}));
  }
}

void test_other_types_are_refused() {
  CHECK_THROWS(assign_to_centers({DType::kInt32, nullptr, nullptr, nullptr, 0, 1, 1, nullptr, nullptr, nullptr}),
               UsageError);
}

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_all_kernels<float>();
  ronde::test_all_kernels<double>();
  ronde::test_results_that_are_not_wanted();
  ronde::test_numbers_without_a_distance();
  ronde::test_other_types_are_refused();
}
