#include "trees/shap.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "trees/crew.h"

namespace ronde {
namespace {

constexpr size_t kRowsOfShapPart = 16;

// A column on the way from the root to a node.
struct Element {
  int32_t column;
  double unknown;  // which part of the rows goes on, if the value is unknown
  double known;    // 1 if the row goes on, 0 if it does not
  double weight;   // of subsets of known columns, one size for each element
};

// The elements of a path: number 0 stands for the root, and has no column.
void extend(Element* path, size_t length, int32_t column, double unknown, double known) {
  path[length] = {column, unknown, known, length == 0 ? 1.0 : 0.0};
  const auto all = static_cast<double>(length + 1);
  for (size_t i = length; i-- > 0;) {
    path[i + 1].weight += known * path[i].weight * static_cast<double>(i + 1) / all;
    path[i].weight *= unknown * static_cast<double>(length - i) / all;
  }
}

// Calls the body with each element but the last, from behind, and the weight that it has without element `removed`.
template <class Body>
void without(const Element* path, size_t last, size_t removed, Body&& body) {
  const double unknown = path[removed].unknown, known = path[removed].known;
  const auto all = static_cast<double>(last + 1);
  double next = path[last].weight;
  for (size_t i = last; i-- > 0;) {
    const auto others = static_cast<double>(last - i);
    if (known != 0) {
      const double weight = next * all / (static_cast<double>(i + 1) * known);
      next = path[i].weight - weight * unknown * others / all;
      body(i, weight);
    } else {
      body(i, path[i].weight * all / (unknown * others));
    }
  }
}

void take_out(Element* path, size_t last, size_t removed) {
  without(path, last, removed, [&](size_t i, double weight) { path[i].weight = weight; });
  for (size_t i = removed; i < last; ++i) {
    path[i].column = path[i + 1].column;
    path[i].unknown = path[i + 1].unknown;
    path[i].known = path[i + 1].known;
  }
}

// One tree and one row.
struct Walk {
  const Trees& trees;
  const int64_t* counts;
  const BinnedRows& rows;
  const Bins& bins;
  size_t root;
  size_t row;
  size_t room;    // elements of a path
  double* to;     // contributions to the first score of the tree
  size_t stride;  // from a score to the next one

  bool goes_left(size_t node) const {
    const auto column = static_cast<size_t>(trees.column[node]);
    const size_t bin = rows.column(column)[row * groups_of(rows.column_count).width];
    if (bin == bins.count(column)) return trees.missing_left[node] != 0;
    if (bins.is_categorical[column] != 0) return (trees.categories[4 * node + bin / 64] >> (bin % 64)) & 1;
    return bin <= static_cast<size_t>(trees.bin[node]);
  }

  void add_leaf(size_t node, const Element* path, size_t last) const {
    for (size_t i = 1; i <= last; ++i) {
      double sum = 0;
      without(path, last, i, [&](size_t, double weight) { sum += weight; });
      const double share = sum * (path[i].known - path[i].unknown);
      for (size_t k = 0; k < trees.value_count; ++k) {
        to[k * stride + static_cast<size_t>(path[i].column)] += share * trees.values[node * trees.value_count + k];
      }
    }
  }

  // `parent`: its path, with `length` elements; those of the nodes below follow, each `room` elements further.
  void visit(size_t node, Element* parent, size_t length, int32_t column, double unknown, double known) const {
    if (unknown == 0 && known == 0) return;  // no rows of the fit, and not this one
    Element* path = parent + room;
    std::copy_n(parent, length, path);
    extend(path, length, column, unknown, known);
    const int32_t split = trees.column[node];
    if (split < 0) return add_leaf(node, path, length);
    size_t last = length;
    double earlier_unknown = 1, earlier_known = 1;
    for (size_t i = 1; i <= last; ++i) {
      if (path[i].column != split) continue;
      earlier_unknown = path[i].unknown;
      earlier_known = path[i].known;
      take_out(path, last--, i);
      break;
    }
    const size_t left = root + static_cast<size_t>(trees.left[node]);
    const double rows_left = static_cast<double>(counts[left]), rows_right = static_cast<double>(counts[left + 1]);
    const double part = rows_left + rows_right > 0 ? rows_left / (rows_left + rows_right) : 0.5;
    const bool is_left = goes_left(node);
    visit(left, path, last + 1, split, earlier_unknown * part, is_left ? earlier_known : 0);
    visit(left + 1, path, last + 1, split, earlier_unknown * (1 - part), is_left ? 0 : earlier_known);
  }
};

size_t deepest(const Trees& trees) {
  std::vector<size_t> depth(trees.node_count);
  size_t most = 0;
  for (size_t tree = 0; tree < trees.tree_count; ++tree) {
    const auto root = static_cast<size_t>(trees.roots[tree]), end = static_cast<size_t>(trees.roots[tree + 1]);
    for (size_t node = root; node < end; ++node) {
      if (trees.column[node] < 0) continue;
      const size_t left = root + static_cast<size_t>(trees.left[node]);
      depth[left] = depth[left + 1] = depth[node] + 1;
      most = std::max(most, depth[left]);
    }
  }
  return most;
}

// The mean values of all trees over the rows of the fit: tree_count x value_count.
std::vector<double> means_of(const Trees& trees, const int64_t* counts) {
  std::vector<double> means(trees.values, trees.values + trees.node_count * trees.value_count), roots;
  for (size_t tree = 0; tree < trees.tree_count; ++tree) {
    const auto root = static_cast<size_t>(trees.roots[tree]), end = static_cast<size_t>(trees.roots[tree + 1]);
    for (size_t node = end; node-- > root;) {
      if (trees.column[node] < 0) continue;
      const size_t left = root + static_cast<size_t>(trees.left[node]);
      const double rows_left = static_cast<double>(counts[left]), rows_right = static_cast<double>(counts[left + 1]);
      const double part = rows_left + rows_right > 0 ? rows_left / (rows_left + rows_right) : 0.5;
      for (size_t k = 0; k < trees.value_count; ++k) {
        means[node * trees.value_count + k] =
            part * means[left * trees.value_count + k] + (1 - part) * means[(left + 1) * trees.value_count + k];
      }
    }
    for (size_t k = 0; k < trees.value_count; ++k) roots.push_back(means[root * trees.value_count + k]);
  }
  return roots;
}

}  // namespace

void add_shap_values(const Trees& trees, const int64_t* counts, const BinnedRows& rows, const Bins& bins,
                     double* contributions, size_t score_count, Crew& crew) {
  const std::vector<double> means = means_of(trees, counts);
  const size_t depth = deepest(trees), stride = rows.column_count + 1;
  // A column is on a path once. A level has a path, and so has what comes before the root.
  const size_t room = std::min(depth, rows.column_count) + 2, levels = depth + 2;
  const size_t parts = (rows.row_count + kRowsOfShapPart - 1) / kRowsOfShapPart, walkers = std::min(parts, crew.size());
  std::vector<Element> paths(walkers * levels * room);  // not in the threads, which must not throw
  std::atomic<size_t> next{0};
  crew.run(walkers, [&](size_t walker) {
    Element* path = paths.data() + walker * levels * room;
    for (size_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
      for (size_t tree = 0; tree < trees.tree_count; ++tree) {
        const auto root = static_cast<size_t>(trees.roots[tree]), score = static_cast<size_t>(trees.scores[tree]);
        for (size_t row = part * kRowsOfShapPart; row < std::min(rows.row_count, (part + 1) * kRowsOfShapPart); ++row) {
          double* to = contributions + (row * score_count + score) * stride;
          const Walk walk{trees, counts, rows, bins, root, row, room, to, stride};
          walk.visit(root, path, 0, -1, 1, 1);
          for (size_t k = 0; k < trees.value_count; ++k) {
            to[k * stride + rows.column_count] += means[tree * trees.value_count + k];
          }
        }
      }
    }
  });
}

}  // namespace ronde
