#include "trees/shap.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <numbers>
#include <utility>
#include <vector>

#include "trees/crew.h"

namespace ronde {
namespace {

constexpr size_t kRowsOfShapPart = 16;
constexpr size_t kLanes = 4;  // points at once
constexpr size_t kNone = std::numeric_limits<size_t>::max();

using Lanes = std::array<double, kLanes>;

// Points in the interval from 0 to 1, and their weights: with n of them, the integral of a polynomial of degree 2n - 1
// is exact (Gauss and Legendre).
struct Quadrature {
  std::vector<Lanes> points, weights;
};

// Returns the Legendre polynomial of a degree at t, and its derivative; |t| < 1.
std::pair<double, double> legendre(size_t degree, double t) {
  double before = 1, value = t;
  for (size_t k = 2; k <= degree; ++k) {
    const auto number = static_cast<double>(k);
    const double next = ((2 * number - 1) * t * value - (number - 1) * before) / number;
    before = value;
    value = next;
  }
  return {value, static_cast<double>(degree) * (before - t * value) / (1 - t * t)};
}

Quadrature quadrature(size_t groups) {
  const size_t count = groups * kLanes;
  Quadrature found{std::vector<Lanes>(groups), std::vector<Lanes>(groups)};
  const auto set = [&found](size_t i, double point, double weight) {
    found.points[i / kLanes][i % kLanes] = point;
    found.weights[i / kLanes][i % kLanes] = weight;
  };
  for (size_t i = 0; i < count / 2; ++i) {
    double t = std::cos(std::numbers::pi * (static_cast<double>(i) + 0.75) / (static_cast<double>(count) + 0.5));
    for (int step = 0; step < 5; ++step) {  // Newton's method has converged before
      const auto [value, slope] = legendre(count, t);
      t -= value / slope;
    }
    const double slope = legendre(count, t).second;
    const double weight = 1 / ((1 - t * t) * slope * slope);
    set(i, (1 - t) / 2, weight);
    set(count - 1 - i, (1 + t) / 2, weight);
  }
  return found;
}

// What holds for the paths of all trees, for any row.
struct Paths {
  std::vector<double> share;   // by node: which part of the rows takes all edges to it that have its edge's column
  std::vector<size_t> above;   // by split: the last node to which an edge with the column of the split leads, or kNone
  std::vector<size_t> groups;  // by tree: kLanes points each
};

double left_part(const int64_t* counts, size_t left) {
  const double rows_left = static_cast<double>(counts[left]), rows_right = static_cast<double>(counts[left + 1]);
  return rows_left + rows_right > 0 ? rows_left / (rows_left + rows_right) : 0.5;
}

Paths paths_of(const Trees& trees, const int64_t* counts) {
  Paths paths{std::vector<double>(trees.node_count, 1), std::vector<size_t>(trees.node_count, kNone), {}};
  std::vector<size_t> parent(trees.node_count), columns(trees.node_count);
  for (size_t tree = 0; tree < trees.tree_count; ++tree) {
    const auto root = static_cast<size_t>(trees.roots[tree]), end = static_cast<size_t>(trees.roots[tree + 1]);
    size_t most = 1;
    for (size_t node = root; node < end; ++node) {
      if (trees.column[node] < 0) continue;
      size_t above = node;
      while (above != root && trees.column[parent[above]] != trees.column[node]) above = parent[above];
      const bool is_new = above == root;
      paths.above[node] = is_new ? kNone : above;
      const size_t left = root + static_cast<size_t>(trees.left[node]);
      const double part = left_part(counts, left), before = is_new ? 1 : paths.share[above];
      paths.share[left] = before * part;
      paths.share[left + 1] = before * (1 - part);
      parent[left] = parent[left + 1] = node;
      columns[left] = columns[left + 1] = columns[node] + (is_new ? 1 : 0);
      most = std::max(most, columns[left]);
    }
    paths.groups.push_back((most + 2 * kLanes - 1) / (2 * kLanes));
  }
  return paths;
}

// What a walker writes to, for the nodes of one tree.
struct Room {
  explicit Room(size_t nodes) : is_known(nodes), products(nodes), sums(nodes) {}

  std::vector<uint8_t> is_known;  // whether the row takes all edges to the node that have the column of its edge
  std::vector<Lanes> products;    // of the factors of all columns on the path, at each point
  std::vector<Lanes> sums;        // of values times products of the leaves below
};

// One tree and one row. The factor of a column at point x is the part of the rows that goes on if the column is known
// with probability x.
struct Walk {
  const Trees& trees;
  const Paths& paths;
  const Quadrature& rule;
  const BinnedRows& rows;
  const Bins& bins;
  size_t root, end;
  size_t row;
  double* to;     // contributions to the first score of the tree
  size_t stride;  // from a score to the next one
  Room& room;

  bool goes_left(size_t node) const {
    const auto column = static_cast<size_t>(trees.column[node]);
    const size_t bin = rows.column(column)[row * groups_of(rows.column_count).width];
    if (bin == bins.count(column)) return trees.missing_left[node] != 0;
    if (bins.is_categorical[column] != 0) return (trees.categories[4 * node + bin / 64] >> (bin % 64)) & 1;
    return bin <= static_cast<size_t>(trees.bin[node]);
  }

  void add() const {
    for (size_t node = root; node < end; ++node) {
      if (trees.column[node] < 0) continue;
      const size_t left = left_of(node), above = paths.above[node];
      const bool can_be = above == kNone || room.is_known[above - root] != 0, is_left = goes_left(node);
      room.is_known[left - root] = can_be && is_left;
      room.is_known[left + 1 - root] = can_be && !is_left;
    }
    for (size_t group = 0; group < rule.points.size(); ++group) {
      multiply(rule.points[group]);
      for (size_t k = 0; k < trees.value_count; ++k) add_value(k, rule.points[group], rule.weights[group]);
    }
  }

 private:
  size_t left_of(size_t node) const { return root + static_cast<size_t>(trees.left[node]); }
  bool is_known(size_t node) const { return room.is_known[node - root] != 0; }

  // Sets the products of all nodes: that of a child has another factor of the column, in place of an earlier one.
  void multiply(const Lanes& x) const {
    room.products[0].fill(1);
    for (size_t node = root; node < end; ++node) {
      if (trees.column[node] < 0) continue;
      for (const size_t child : {left_of(node), left_of(node) + 1}) {
        const Lanes factor = factor_of(child, paths.above[node], x);
        Lanes& product = room.products[child - root];
        product = room.products[node - root];
        for (size_t i = 0; i < kLanes; ++i) product[i] *= factor[i];
      }
    }
  }

  Lanes factor_of(size_t child, size_t above, const Lanes& x) const {
    Lanes factor;
    const double share = paths.share[child], known = is_known(child) ? 1 : 0;
    if (above != kNone && !is_known(above)) {
      factor.fill(paths.share[above] > 0 ? share / paths.share[above] : 0);
      return factor;
    }
    for (size_t i = 0; i < kLanes; ++i) factor[i] = known * x[i] + share * (1 - x[i]);
    if (above == kNone) return factor;
    for (size_t i = 0; i < kLanes; ++i) factor[i] /= x[i] + paths.share[above] * (1 - x[i]);
    return factor;
  }

  // Adds what the columns of all edges add to value k, from the leaves up.
  void add_value(size_t k, const Lanes& x, const Lanes& weights) const {
    for (size_t node = end; node-- > root;) {
      Lanes& sums = room.sums[node - root];
      if (trees.column[node] < 0) {
        sums = room.products[node - root];
        for (double& sum : sums) sum *= trees.values[node * trees.value_count + k];
        continue;
      }
      const Lanes before = change_of(paths.above[node], x);
      double added = 0;
      sums.fill(0);
      for (const size_t child : {left_of(node), left_of(node) + 1}) {
        const Lanes change = change_of(child, x), &below = room.sums[child - root];
        for (size_t i = 0; i < kLanes; ++i) {
          added += weights[i] * below[i] * (change[i] - before[i]);
          sums[i] += below[i];
        }
      }
      to[k * stride + static_cast<size_t>(trees.column[node])] += added;
    }
  }

  // The difference that it makes to the product whether a column is known, relative to its factor.
  Lanes change_of(size_t node, const Lanes& x) const {
    Lanes change{};
    if (node == kNone) return change;
    const double share = paths.share[node];
    if (is_known(node)) {
      for (size_t i = 0; i < kLanes; ++i) change[i] = (1 - share) / (x[i] + share * (1 - x[i]));
    } else {
      for (size_t i = 0; i < kLanes; ++i) change[i] = -1 / (1 - x[i]);
    }
    return change;
  }
};

// The mean values of all trees over the rows of the fit: tree_count x value_count.
std::vector<double> means_of(const Trees& trees, const int64_t* counts) {
  std::vector<double> means(trees.values, trees.values + trees.node_count * trees.value_count), roots;
  for (size_t tree = 0; tree < trees.tree_count; ++tree) {
    const auto root = static_cast<size_t>(trees.roots[tree]), end = static_cast<size_t>(trees.roots[tree + 1]);
    for (size_t node = end; node-- > root;) {
      if (trees.column[node] < 0) continue;
      const size_t left = root + static_cast<size_t>(trees.left[node]);
      const double part = left_part(counts, left);
      for (size_t k = 0; k < trees.value_count; ++k) {
        means[node * trees.value_count + k] =
            part * means[left * trees.value_count + k] + (1 - part) * means[(left + 1) * trees.value_count + k];
      }
    }
    for (size_t k = 0; k < trees.value_count; ++k) roots.push_back(means[root * trees.value_count + k]);
  }
  return roots;
}

size_t largest_tree(const Trees& trees) {
  int64_t most = 0;
  for (size_t tree = 0; tree < trees.tree_count; ++tree) {
    most = std::max(most, trees.roots[tree + 1] - trees.roots[tree]);
  }
  return static_cast<size_t>(most);
}

}  // namespace

void add_shap_values(const Trees& trees, const int64_t* counts, const BinnedRows& rows, const Bins& bins,
                     double* contributions, size_t score_count, Crew& crew) {
  const std::vector<double> means = means_of(trees, counts);
  const Paths paths = paths_of(trees, counts);
  std::map<size_t, Quadrature> rules;
  for (const size_t groups : paths.groups) {
    if (!rules.contains(groups)) rules.emplace(groups, quadrature(groups));
  }
  const size_t stride = rows.column_count + 1;
  const size_t parts = (rows.row_count + kRowsOfShapPart - 1) / kRowsOfShapPart, walkers = std::min(parts, crew.size());
  std::vector<Room> rooms(walkers, Room(largest_tree(trees)));  // not in the threads, which must not throw
  std::atomic<size_t> next{0};
  crew.run(walkers, [&](size_t walker) {
    for (size_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
      for (size_t tree = 0; tree < trees.tree_count; ++tree) {
        const auto root = static_cast<size_t>(trees.roots[tree]), end = static_cast<size_t>(trees.roots[tree + 1]);
        const auto score = static_cast<size_t>(trees.scores[tree]);
        const Quadrature& rule = rules.find(paths.groups[tree])->second;
        for (size_t row = part * kRowsOfShapPart; row < std::min(rows.row_count, (part + 1) * kRowsOfShapPart); ++row) {
          double* to = contributions + (row * score_count + score) * stride;
          Walk{trees, paths, rule, rows, bins, root, end, row, to, stride, rooms[walker]}.add();
          for (size_t k = 0; k < trees.value_count; ++k) {
            to[k * stride + rows.column_count] += means[tree * trees.value_count + k];
          }
        }
      }
    }
  });
}

}  // namespace ronde
