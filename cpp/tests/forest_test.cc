// Forests: the same trees for any number of threads and any order of the rows, and leaves with the shares of their
// rows.
#include "trees/forest.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "trees/crew.h"

namespace ronde {
namespace {

constexpr size_t kRows = 700, kColumns = 5, kBins = 20;

struct Data {
  std::vector<uint8_t> bins;
  std::vector<double> y;
  std::vector<int64_t> integers, weights;
  std::vector<uint32_t> firsts, repeats;
  std::vector<uint64_t> identities;
  std::vector<double> values;
  std::vector<int64_t> starts{0};
  std::vector<uint8_t> is_categorical;

  // With the rows in this order.
  explicit Data(const std::vector<uint32_t>& order)
      : bins(kRows * kColumns),
        y(kRows),
        integers(kRows),
        weights(kRows, 1),
        firsts(kRows),
        repeats(kRows, 1),
        identities(kRows),
        is_categorical(kColumns) {
    std::mt19937_64 generator(20261128);
    is_categorical[2] = 1;
    for (size_t c = 0; c < kColumns; ++c) {
      const size_t count = kBins - (c == 2 ? 0 : 1);
      for (size_t i = 0; i < count; ++i) values.push_back(static_cast<double>(i));
      starts.push_back(static_cast<int64_t>(values.size()));
    }
    for (const uint32_t row : order) {
      for (size_t c = 0; c < kColumns; ++c) bins[c * kRows + row] = static_cast<uint8_t>(generator() % (kBins + 1));
      const bool is_one = (bins[row] < 7) != (bins[2 * kRows + row] % 3 == 0);
      integers[row] = is_one != (generator() % 9 == 0) ? 1 : 0;
      y[row] = static_cast<double>(integers[row]);
    }
    Crew crew(2);
    identify_rows(bins.data(), kRows, kColumns, identities.data(), crew);
  }

  std::vector<ForestTree> grow(bool are_classes, double rate, size_t threads) const {
    const Bins by{values.data(), starts.data(), is_categorical.data()};
    const Draws draws{identities.data(), firsts.data(), repeats.data(), kRows, rate};
    const ForestRows rows{bins.data(),
                          kRows,
                          kColumns,
                          by,
                          draws,
                          weights.data(),
                          y.data(),
                          are_classes ? nullptr : integers.data(),
                          are_classes ? size_t{2} : size_t{0},
                          nullptr,
                          nullptr};
    const ForestRules rules{are_classes ? Criterion::kGini : Criterion::kSquared, 0, 100, 1, 2, 0, 0, 1, 2, false};
    const std::vector<uint64_t> seeds{3, 1, 4, 1, 5};
    Crew crew(threads);
    return grow_forest(rows, rules, seeds.data(), seeds.size(), crew);
  }
};

std::vector<uint32_t> ascending() {
  std::vector<uint32_t> order(kRows);
  std::iota(order.begin(), order.end(), 0u);
  return order;
}

bool are_equal(const ForestTree& a, const ForestTree& b) {
  return a.column == b.column && a.bin == b.bin && a.left == b.left && a.missing_left == b.missing_left &&
         a.categories == b.categories && a.values == b.values && a.gain == b.gain && a.count == b.count;
}

void test_the_same_trees_for_all_threads_and_orders() {
  const Data data(ascending());
  std::vector<uint32_t> order = ascending();
  std::reverse(order.begin(), order.end());
  const Data reversed(order);
  for (const bool are_classes : {false, true}) {
    const std::vector<ForestTree> trees = data.grow(are_classes, 1, 1);
    CHECK(are_equal(trees[1], trees[3]) && !are_equal(trees[0], trees[1]));
    const std::vector<ForestTree> threaded = data.grow(are_classes, 1, 3), turned = reversed.grow(are_classes, 1, 2);
    for (size_t tree = 0; tree < trees.size(); ++tree) {
      CHECK(are_equal(trees[tree], threaded[tree]));
      CHECK(are_equal(trees[tree], turned[tree]));
    }
  }
}

void test_leaves_have_the_rows() {
  const Data data(ascending());
  for (const bool are_classes : {false, true}) {
    for (const ForestTree& tree : data.grow(are_classes, 0, 2)) {
      CHECK(tree.count[0] == static_cast<int64_t>(kRows));
      int64_t rows = 0;
      double ones = 0;
      for (size_t node = 0; node < tree.column.size(); ++node) {
        if (tree.column[node] >= 0) {
          const auto left = static_cast<size_t>(tree.left[node]);
          CHECK(left > node && tree.count[left] + tree.count[left + 1] == tree.count[node]);
          continue;
        }
        rows += tree.count[node];
        ones += static_cast<double>(tree.count[node]) * tree.values[are_classes ? 2 * node + 1 : node];
      }
      CHECK(rows == static_cast<int64_t>(kRows));
      CHECK(std::abs(ones - std::accumulate(data.y.begin(), data.y.end(), 0.0)) < 1e-9);
    }
  }
}

void test_draws_have_their_mean() {
  const Data data(ascending());
  const Draws draws{data.identities.data(), data.firsts.data(), data.repeats.data(), kRows, 0.5};
  std::vector<uint32_t> counts(kRows);
  uint32_t sum = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    count_draws(draws, seed, counts.data());
    sum = std::accumulate(counts.begin(), counts.end(), sum);
  }
  CHECK(sum > 34'000 && sum < 36'000);
}

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_the_same_trees_for_all_threads_and_orders();
  ronde::test_leaves_have_the_rows();
  ronde::test_draws_have_their_mean();
}
