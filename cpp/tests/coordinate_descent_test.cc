// The minimum that coordinate descent finds: checked by its optimality conditions, and against one known in closed
// form.
#include "kernels/coordinate_descent.h"

#include <cmath>
#include <random>
#include <vector>

#include "check.h"

namespace ronde {
namespace {

std::mt19937_64 generator(20261127);

// Exactly as many elements as there are, so that AddressSanitizer detects accesses behind them.
struct Problem {
  std::vector<double> matrix, slopes, penalties, gradient, w;

  explicit Problem(size_t size) : matrix(size * size), slopes(size), penalties(size), gradient(size), w(size) {}

  size_t size() const { return w.size(); }

  size_t descend(double tolerance, size_t max_passes) {
    return descend_coordinates({matrix.data(), penalties.data(), gradient.data(), w.data(), size()}, tolerance,
                               max_passes);
  }

  double gradient_at(size_t j) const {
    double sum = slopes[j];
    for (size_t k = 0; k < size(); ++k) sum += matrix[j * size() + k] * w[k];
    return sum;
  }

  // The least subgradient, from the gradient at w as it is.
  double violation() const {
    double largest = 0;
    for (size_t j = 0; j < size(); ++j) {
      const double g = gradient_at(j);
      const double excess = w[j] != 0 ? std::abs(g + std::copysign(penalties[j], w[j])) : std::abs(g) - penalties[j];
      largest = std::max(largest, excess);
    }
    return largest;
  }
};

// The matrix is R'R for a random R with `rows` rows, so that it is singular if there are fewer than columns.
Problem random_problem(size_t size, size_t rows) {
  std::normal_distribution<double> normal;
  std::vector<double> factors(rows * size);
  for (double& each : factors) each = normal(generator);
  Problem problem(size);
  for (size_t j = 0; j < size; ++j)
    for (size_t k = 0; k < size; ++k)
      for (size_t row = 0; row < rows; ++row)
        problem.matrix[j * size + k] += factors[row * size + j] * factors[row * size + k] / static_cast<double>(rows);
  for (size_t row = 0; row < rows; ++row) {
    const double target = normal(generator);
    for (size_t j = 0; j < size; ++j) problem.slopes[j] -= factors[row * size + j] * target / static_cast<double>(rows);
  }
  for (double& penalty : problem.penalties) penalty = 0.01 + 0.1 * std::abs(normal(generator));
  problem.gradient = problem.slopes;
  return problem;
}

void test_the_minimum_fulfills_its_conditions() {
  for (size_t size : {1u, 2u, 7u, 40u})
    for (size_t rows : {3u, 30u, 100u}) {
      Problem problem = random_problem(size, rows);
      const size_t passes = problem.descend(1e-10, 1'000'000);
      CHECK(passes < 1'000'000);
      CHECK(problem.violation() < 1e-9);
      CHECK(problem.descend(1e-9, 10) == 0);  // it is there
    }
}

void test_separate_coordinates_have_a_closed_form() {
  Problem problem(3);
  for (size_t j = 0; j < 3; ++j) problem.matrix[j * 4] = 2;
  problem.penalties = {1, 1, 1};
  problem.slopes = problem.gradient = {-5, 0.5, 3};
  CHECK(problem.descend(0, 5) == 1);
  CHECK((problem.w == std::vector<double>{2, 0, -1}));
  CHECK((problem.gradient == std::vector<double>{-1, 0.5, 1}));
}

void test_a_coordinate_without_curvature_stays() {
  Problem problem(2);
  problem.matrix[0] = 1;
  problem.gradient = {-2, -7};
  CHECK(problem.descend(0, 5) == 1);
  CHECK((problem.w == std::vector<double>{2, 0}));
}

void test_passes_have_a_limit() {
  Problem problem = random_problem(20, 3);
  CHECK(problem.descend(0, 3) == 3);
  CHECK(problem.descend(std::nan(""), 3) == 0);
}

void test_no_coordinates() { CHECK(Problem(0).descend(0, 3) == 0); }

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_the_minimum_fulfills_its_conditions();
  ronde::test_separate_coordinates_have_a_closed_form();
  ronde::test_a_coordinate_without_curvature_stays();
  ronde::test_passes_have_a_limit();
  ronde::test_no_coordinates();
}
