// Trees: the histograms' sums against plain ones, the same tree for any number of threads and tasks, and predictions
// that agree with the leaves in which growth has put the rows.
#include <pthread.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "trees/binned_rows.h"
#include "trees/crew.h"
#include "trees/gradients.h"
#include "trees/growing.h"
#include "trees/leaves.h"
#include "trees/prediction.h"
#include "trees/ranking.h"
#include "trees/shap.h"

namespace ronde {
namespace {

constexpr size_t kRows = 3000, kColumns = 19, kLeaves = 15;

struct Data {
  std::vector<double> X, gradients, hessians, values;
  std::vector<int64_t> starts{0};
  std::vector<uint8_t> is_categorical;

  Data() : X(kRows * kColumns), gradients(kRows), hessians(kRows), is_categorical(kColumns) {
    std::mt19937_64 generator(20261128);
    std::normal_distribution<double> normal;
    is_categorical[2] = 1;
    for (size_t row = 0; row < kRows; ++row) {
      for (size_t c = 0; c < kColumns; ++c) X[row * kColumns + c] = normal(generator);
      X[row * kColumns + 2] = static_cast<double>(generator() % 5);
      if (generator() % 7 == 0) X[row * kColumns + 1] = std::numeric_limits<double>::quiet_NaN();
      const double target = X[row * kColumns] * X[row * kColumns + 3] + (X[row * kColumns + 2] == 3 ? 2 : 0);
      gradients[row] = normal(generator) / 10 - target;
      hessians[row] = 0.5 + std::abs(normal(generator));
    }
    for (size_t c = 0; c < kColumns; ++c) {
      const size_t count = c == 2 ? 5 : 40;
      for (size_t i = 0; i < count; ++i) {
        values.push_back(c == 2 ? static_cast<double>(i) : -2 + 0.1 * static_cast<double>(i));
      }
      starts.push_back(static_cast<int64_t>(values.size()));
    }
  }

  Bins bins() const { return {values.data(), starts.data(), is_categorical.data()}; }
};

// The rows of one task, and its tree.
struct Task {
  size_t begin, count;
  std::vector<uint8_t> binned;
  std::vector<int64_t> integers;
  std::vector<uint32_t> permutation;
  std::vector<int32_t> column, bin, left;
  std::vector<uint8_t> missing_left;
  std::vector<uint64_t> categories;
  std::vector<double> gain, bounds;
  std::vector<int64_t> node_count, places;
  size_t nodes = 0;

  Task(const Data& data, size_t begin, size_t end, size_t threads)
      : begin(begin),
        count(end - begin),
        binned(groups_of(kColumns).count * groups_of(kColumns).width * count),
        integers(count),
        permutation(count),
        column(2 * kLeaves - 1),
        bin(column.size()),
        left(column.size()),
        missing_left(column.size()),
        categories(4 * column.size()),
        gain(column.size()),
        bounds(2 * column.size()),
        node_count(column.size()),
        places(2 * column.size()) {
    Crew crew(threads);
    bin_rows(DType::kFloat64, data.X.data() + begin * kColumns, count, kColumns, data.bins(), binned.data(), crew);
    const Packing packing = Packing::of(kRows);
    pack({data.gradients.data() + begin, data.hessians.data() + begin, nullptr, nullptr, count, 1, 0,
          packing.most_gradient / 20, packing.most_hessian / 20, 7, begin},
         packing, integers.data(), crew);
  }

  void grow(const Data& data, const SumOverTasks& sum, size_t threads) {
    const Packing packing = Packing::of(kRows);
    const Bins bins = data.bins();
    const TreeRows rows{{binned.data(), count, kColumns}, bins, integers.data(), packing, packing.most_gradient / 20,
                        packing.most_hessian / 20,        kRows};
    const TreeRules rules{kLeaves, 100, 20, 1e-3, 0, 0, 1, kColumns, false, 3, nullptr, nullptr, nullptr, 0};
    Crew crew(threads);
    nodes = grow_tree(rows, rules, sum,
                      {column.data(), bin.data(), left.data(), missing_left.data(), categories.data(), gain.data(),
                       node_count.data(), bounds.data(), places.data()},
                      permutation.data(), crew);
  }

  bool has_tree_of(const Task& other) const {
    return nodes == other.nodes && column == other.column && bin == other.bin && left == other.left &&
           missing_left == other.missing_left && categories == other.categories && gain == other.gain &&
           node_count == other.node_count;
  }

  Trees trees(const std::vector<double>& values, const std::vector<int64_t>& roots,
              const std::vector<int32_t>& scores) const {
    return {column.data(),
            bin.data(),
            left.data(),
            missing_left.data(),
            categories.data(),
            values.data(),
            nodes,
            1,
            roots.data(),
            scores.data(),
            1};
  }
};

void test_integers_have_the_mean() {
  const Data data;
  Crew crew(1);
  const Packing packing = Packing::of(1 << 20);  // few bits
  CHECK(packing.is_random && packing.block_rows == 8191);
  std::vector<int64_t> integers(kRows);
  pack({data.gradients.data(), data.hessians.data(), nullptr, nullptr, kRows, 1, 0, 10, 10, 7, 0}, packing,
       integers.data(), crew);
  const int64_t sum = std::accumulate(integers.begin(), integers.end(), int64_t{0});
  CHECK((sum & ((1 << packing.count_bits) - 1)) == static_cast<int64_t>(kRows));
  const auto gradient = static_cast<double>(sum >> (packing.count_bits + packing.hessian_bits)) / 10;
  const auto hessian =
      static_cast<double>((sum >> packing.count_bits) & ((int64_t{1} << packing.hessian_bits) - 1)) / 10;
  CHECK(std::abs(gradient - std::accumulate(data.gradients.begin(), data.gradients.end(), 0.0)) < 10);
  CHECK(std::abs(hessian - std::accumulate(data.hessians.begin(), data.hessians.end(), 0.0)) < 10);
}

// Two tasks, one after the other: the first pass notes the first task's histograms, which the second one adds.
void test_the_same_tree_for_all_threads_and_tasks() {
  const Data data;
  Task whole(data, 0, kRows, 1);
  std::vector<std::vector<int64_t>> sums;
  whole.grow(data, [&](int64_t* numbers, size_t count) { sums.emplace_back(numbers, numbers + count); }, 1);
  CHECK(whole.nodes == 2 * kLeaves - 1);
  for (const size_t threads : {2u, 3u}) {
    Task other(data, 0, kRows, threads);
    other.grow(data, {}, threads);
    CHECK(other.has_tree_of(whole));
    CHECK(other.permutation == whole.permutation);
  }
  // A task that gets the sums over all tasks makes the tree of all.
  for (const size_t border : {size_t{0}, size_t{1000}, kRows}) {
    Task part(data, border, kRows, 1);
    size_t call = 0;
    part.grow(
        data,
        [&](int64_t* numbers, size_t count) {
          CHECK(call < sums.size() && sums[call].size() == count);
          if (border == 0) CHECK(std::memcmp(numbers, sums[call].data(), count * sizeof *numbers) == 0);
          std::memcpy(numbers, sums[call++].data(), count * sizeof *numbers);
        },
        2);
    CHECK(part.has_tree_of(whole));
    for (size_t node = 0; node < part.nodes; ++node) {
      CHECK(part.places[2 * node + 1] - part.places[2 * node] <= part.node_count[node]);
    }
  }
}

void test_predictions_are_the_values_of_the_leaves() {
  const Data data;
  Task task(data, 0, kRows, 2);
  task.grow(data, {}, 2);
  std::vector<double> values(task.nodes), leaf_values;
  std::vector<int64_t> places;
  for (size_t node = 0; node < task.nodes; ++node) {
    values[node] = static_cast<double>(node) + 1;
    if (task.column[node] >= 0) continue;
    leaf_values.push_back(values[node]);
    places.insert(places.end(), {task.places[2 * node], task.places[2 * node + 1]});
  }
  Crew crew(2);
  std::vector<double> expected(kRows), scores(kRows);
  const LeafRows leaves{task.permutation.data(), places.data(), leaf_values.size(), task.integers.data()};
  add_values(leaves, leaf_values.data(), expected.data(), 1, 0, crew);
  const std::vector<int64_t> roots{0, static_cast<int64_t>(task.nodes)};
  const std::vector<int32_t> tree_scores{0};
  const Trees trees = task.trees(values, roots, tree_scores);
  CHECK(are_sound(trees, kColumns, 1));
  CHECK(!are_sound(trees, 1, 1));
  const Bins bins = data.bins();
  predict(trees, {task.binned.data(), kRows, kColumns}, bins, scores.data(), 1, crew);
  CHECK(scores == expected);
  std::vector<int32_t> found(kRows);
  find_leaves(trees, {task.binned.data(), kRows, kColumns}, bins, found.data(), crew);
  for (size_t row = 0; row < kRows; ++row) CHECK(scores[row] == found[row] + 1);

  std::vector<int64_t> sums(2 * leaf_values.size());
  sum_leaves(leaves, data.gradients.data(), data.hessians.data(), 1, 0, 0x1p30, 0x1p30, sums.data(), crew);
  double total = 0;
  for (size_t leaf = 0; leaf < leaf_values.size(); ++leaf) total += static_cast<double>(sums[2 * leaf]) * 0x1p-30;
  CHECK(std::abs(total - std::accumulate(data.gradients.begin(), data.gradients.end(), 0.0)) < 1e-5);
}

void test_shap_values_add_up_to_predictions() {
  const Data data;
  Task task(data, 0, kRows, 2);
  task.grow(data, {}, 2);
  std::vector<double> values(task.nodes);
  std::iota(values.begin(), values.end(), 1.0);
  const std::vector<int64_t> roots{0, static_cast<int64_t>(task.nodes)};
  const std::vector<int32_t> tree_scores{0};
  const Trees trees = task.trees(values, roots, tree_scores);
  const Bins bins = data.bins();
  const BinnedRows rows{task.binned.data(), kRows, kColumns};
  std::vector<double> scores(kRows), one(kRows * (kColumns + 1)), several(one.size());
  Crew alone(1), crew(3);
  predict(trees, rows, bins, scores.data(), 1, crew);
  add_shap_values(trees, task.node_count.data(), rows, bins, one.data(), 1, alone);
  add_shap_values(trees, task.node_count.data(), rows, bins, several.data(), 1, crew);
  CHECK(one == several);
  double mean = 0;
  for (size_t row = 0; row < kRows; ++row) {
    const auto first = one.begin() + static_cast<int64_t>(row * (kColumns + 1));
    CHECK(std::abs(std::accumulate(first, first + kColumns + 1, 0.0) - scores[row]) < 1e-9);
    mean += scores[row] / kRows;
  }
  CHECK(std::abs(one[kColumns] - mean) < 1e-9);
}

// The derivatives of a loss against differences of it.
void test_derivatives_are_slopes() {
  Crew crew(1);
  const auto at = [&](Loss loss, double parameter, double y, double score, double* gradient, double* hessian) {
    const int64_t starts[] = {0, 1};
    double losses[2];
    derive({loss, parameter, &y, nullptr, nullptr, &score, 1, 1}, starts, 1, gradient, hessian, losses, crew);
    return losses[0];
  };
  constexpr double kStep = 1e-5;
  for (const auto& [loss, parameter] : {std::pair{Loss::kHuber, 0.5}, std::pair{Loss::kTweedie, 1.3}}) {
    for (const double score : {-1.0, 0.4, 0.9, 2.0}) {
      double gradient, hessian, below, above, ignored;
      at(loss, parameter, 0.7, score, &gradient, &hessian);
      const double low = at(loss, parameter, 0.7, score - kStep, &below, &ignored);
      const double high = at(loss, parameter, 0.7, score + kStep, &above, &ignored);
      CHECK(std::abs((high - low) / (2 * kStep) - gradient) < 1e-6);
      if (loss == Loss::kTweedie) CHECK(std::abs((above - below) / (2 * kStep) - hessian) < 1e-6);
    }
  }
}

// No thread can start: its stack would be larger than the address space.
void test_derivatives_of_a_ranking() {
  constexpr size_t kQueries = 60;
  std::mt19937_64 generator(28);
  std::normal_distribution<double> normal;
  std::vector<int64_t> starts{0};
  std::vector<double> y, scores;
  for (size_t query = 0; query < kQueries; ++query) {
    const size_t count = 1 + generator() % 30;
    for (size_t i = 0; i < count; ++i) {
      y.push_back(static_cast<double>(generator() % 4));
      scores.push_back(normal(generator));
    }
    starts.push_back(static_cast<int64_t>(y.size()));
  }
  std::vector<double> gradients[2], hessians[2], losses[2];
  for (const size_t i : {size_t{0}, size_t{1}}) {
    for (auto* numbers : {&gradients[i], &hessians[i]}) numbers->resize(y.size());
    losses[i].resize(kQueries);
    Crew crew(1 + 2 * i);
    derive_ranking({y.data(), scores.data(), starts.data(), kQueries, 10}, gradients[i].data(), hessians[i].data(),
                   losses[i].data(), crew);
  }
  CHECK(gradients[0] == gradients[1] && hessians[0] == hessians[1] && losses[0] == losses[1]);
  for (size_t query = 0; query < kQueries; ++query) {
    double sum = 0;
    for (auto row = static_cast<size_t>(starts[query]); row < static_cast<size_t>(starts[query + 1]); ++row) {
      sum += gradients[0][row];
      CHECK(hessians[0][row] >= 0);
    }
    CHECK(std::abs(sum) < 1e-9 && losses[0][query] >= 0 && losses[0][query] < 1);
  }
}

void test_a_crew_without_threads_does_the_work() {
  pthread_attr_t usual, huge;
  CHECK(pthread_getattr_default_np(&usual) == 0 && pthread_getattr_default_np(&huge) == 0);
  CHECK(pthread_attr_setstacksize(&huge, size_t{1} << 47) == 0 && pthread_setattr_default_np(&huge) == 0);
  Crew crew(3);
  CHECK(pthread_setattr_default_np(&usual) == 0);
  CHECK(crew.size() == 1);
  size_t sum = 0;
  crew.run(5, [&](size_t part) { sum += part; });
  CHECK(sum == 10);
}

void test_roots_out_of_range_are_not_trees() {
  const Data data;
  Task task(data, 0, kRows, 1);
  task.grow(data, {}, 1);
  const std::vector<double> values(task.nodes);
  const std::vector<int32_t> tree_scores{0, 0};
  constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
  const std::vector<int64_t> roots{0, kLowest, static_cast<int64_t>(task.nodes)};
  Trees trees = task.trees(values, roots, tree_scores);
  trees.tree_count = 2;
  CHECK(!are_sound(trees, kColumns, 1));
}

void test_a_task_without_rows_has_a_tree() {
  Data data;
  Task task(data, 0, 0, 1);
  task.grow(data, {}, 1);
  CHECK(task.nodes == 1 && task.node_count[0] == 0);
}

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_integers_have_the_mean();
  ronde::test_the_same_tree_for_all_threads_and_tasks();
  ronde::test_predictions_are_the_values_of_the_leaves();
  ronde::test_shap_values_add_up_to_predictions();
  ronde::test_derivatives_are_slopes();
  ronde::test_derivatives_of_a_ranking();
  ronde::test_a_crew_without_threads_does_the_work();
  ronde::test_roots_out_of_range_are_not_trees();
  ronde::test_a_task_without_rows_has_a_tree();
}
