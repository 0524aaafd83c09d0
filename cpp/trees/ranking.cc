#include "trees/ranking.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "trees/crew.h"

namespace ronde {
namespace {

constexpr double kLeastDifference = 0.01;  // of scores: closer ones would count too much

double gain(double relevance) { return std::ldexp(1.0, static_cast<int>(relevance)) - 1; }
double discount(size_t rank) { return 1 / std::log2(2.0 + static_cast<double>(rank)); }

struct Group {
  const double* y;
  const double* scores;
  double* gradients;
  double* hessians;
  size_t size;
};

// The sum of discounted gains of rows in this order.
double cumulative_gain(const Group& group, const uint32_t* order, size_t truncation) {
  double sum = 0;
  for (size_t rank = 0; rank < std::min(group.size, truncation); ++rank) {
    sum += gain(group.y[order[rank]]) * discount(rank);
  }
  return sum;
}

// Adds the derivatives of one pair. Returns what it adds to the sum of slopes.
double add_pair(const Group& group, size_t better, size_t worse, double change, bool has_spread) {
  const double difference = group.scores[better] - group.scores[worse];
  if (has_spread) change /= kLeastDifference + std::abs(difference);
  const double probability = 1 / (1 + std::exp(difference));  // that the pair is in the wrong order
  const double slope = change * probability, curvature = slope * (1 - probability);
  group.gradients[better] -= slope;
  group.gradients[worse] += slope;
  group.hessians[better] += curvature;
  group.hessians[worse] += curvature;
  return 2 * slope;
}

// Returns 1 - NDCG. `order`: room for the rows of the group.
double derive_group(const Group& group, uint32_t* order, size_t truncation) {
  std::fill_n(group.gradients, group.size, 0.0);
  std::fill_n(group.hessians, group.size, 0.0);
  for (size_t row = 0; row < group.size; ++row) order[row] = static_cast<uint32_t>(row);
  // Rows are numbered, and equal ones keep their order: the same on all machines.
  const auto by = [](const double* numbers) {
    return [numbers](uint32_t a, uint32_t b) { return numbers[a] != numbers[b] ? numbers[a] > numbers[b] : a < b; };
  };
  std::sort(order, order + group.size, by(group.y));
  const double best = cumulative_gain(group, order, truncation);
  if (best <= 0) return 0;
  std::sort(order, order + group.size, by(group.scores));
  const bool has_spread = group.scores[order[0]] != group.scores[order[group.size - 1]];
  double slopes = 0;
  for (size_t first = 0; first < std::min(group.size, truncation); ++first) {
    for (size_t second = first + 1; second < group.size; ++second) {
      const size_t a = order[first], b = order[second];
      if (group.y[a] == group.y[b]) continue;
      const double change = std::abs(gain(group.y[a]) - gain(group.y[b])) * (discount(first) - discount(second)) / best;
      slopes += group.y[a] > group.y[b] ? add_pair(group, a, b, change, has_spread)
                                        : add_pair(group, b, a, change, has_spread);
    }
  }
  if (slopes > 0) {  // so that large groups do not outweigh small ones
    const double factor = std::log2(1 + slopes) / slopes;
    for (size_t row = 0; row < group.size; ++row) {
      group.gradients[row] *= factor;
      group.hessians[row] *= factor;
    }
  }
  return 1 - cumulative_gain(group, order, truncation) / best;
}

}  // namespace

void derive_ranking(const RankedGroups& groups, double* gradients, double* hessians, double* losses, Crew& crew) {
  int64_t largest = 0;
  for (size_t g = 0; g < groups.group_count; ++g) {
    largest = std::max(largest, groups.starts[g + 1] - groups.starts[g]);
  }
  const size_t walkers = std::min(groups.group_count, crew.size());
  std::vector<uint32_t> orders(walkers * static_cast<size_t>(largest));  // not in the threads, which must not throw
  std::atomic<size_t> next{0};
  crew.run(walkers, [&](size_t walker) {
    uint32_t* order = orders.data() + walker * static_cast<size_t>(largest);
    for (size_t g; (g = next.fetch_add(1, std::memory_order_relaxed)) < groups.group_count;) {
      const auto begin = static_cast<size_t>(groups.starts[g]), end = static_cast<size_t>(groups.starts[g + 1]);
      const Group group{groups.y + begin, groups.scores + begin, gradients + begin, hessians + begin, end - begin};
      losses[g] = derive_group(group, order, groups.truncation);
    }
  });
}

}  // namespace ronde
