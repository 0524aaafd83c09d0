#include "trees/prediction.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "trees/crew.h"

namespace ronde {
namespace {

constexpr size_t kRowsOfPart = 512;
constexpr size_t kTogether = 8;  // rows that walk down a tree side by side, so that the processor need not wait for one
constexpr uint16_t kNoBin = 256;

// A leaf has itself as its left child, and all rows go left.
struct Step {
  uint32_t column;
  uint32_t left;
  uint16_t bin;      // rows with at most this bin go left
  uint16_t missing;  // so do rows with this one
  int32_t category;  // the number of the node, if bits of categories decide; else -1
};

struct Walks {
  std::vector<Step> steps;
  std::vector<size_t> depths;  // of the trees
  bool has_categories = false;
};

Walks walks_of(const Trees& trees, const Bins& bins) {
  Walks walks;
  walks.steps.resize(trees.node_count);
  walks.depths.resize(trees.tree_count);
  std::vector<size_t> depth(trees.node_count);
  for (size_t tree = 0; tree < trees.tree_count; ++tree) {
    const auto root = static_cast<size_t>(trees.roots[tree]), end = static_cast<size_t>(trees.roots[tree + 1]);
    for (size_t node = root; node < end; ++node) {
      Step& step = walks.steps[node];
      if (trees.column[node] < 0) {
        step = {0, static_cast<uint32_t>(node), kNoBin, kNoBin, -1};
        walks.depths[tree] = std::max(walks.depths[tree], depth[node]);
        continue;
      }
      const auto column = static_cast<size_t>(trees.column[node]);
      const size_t left = root + static_cast<size_t>(trees.left[node]);
      const bool is_category = bins.is_categorical[column] != 0;
      walks.has_categories |= is_category;
      step = {static_cast<uint32_t>(column), static_cast<uint32_t>(left), static_cast<uint16_t>(trees.bin[node]),
              trees.missing_left[node] ? static_cast<uint16_t>(bins.count(column)) : kNoBin,
              is_category ? static_cast<int32_t>(node) : -1};
      depth[left] = depth[left + 1] = depth[node] + 1;
    }
  }
  return walks;
}

template <bool kHasCategories>
bool goes_left(const Trees& trees, const Step& step, const Bins& bins, uint8_t bin) {
  if (kHasCategories && step.category >= 0) {
    if (bin == bins.count(step.column)) return step.missing != kNoBin;
    return (trees.categories[4 * static_cast<size_t>(step.category) + bin / 64] >> (bin % 64)) & 1;
  }
  return (bin <= step.bin) | (bin == step.missing);
}

// Calls the body with row, tree and leaf. `bytes`: room for kRowsOfPart * column_count.
template <bool kHasCategories, class Body>
void walk(const Trees& trees, const Walks& walks, const BinnedRows& rows, const Bins& bins, size_t begin, size_t end,
          uint8_t* bytes, Body&& body) {
  // The bytes of a row next to each other.
  const size_t width = groups_of(rows.column_count).width;
  for (size_t column = 0; column < rows.column_count; ++column) {
    const uint8_t* from = rows.column(column);
    for (size_t row = begin; row < end; ++row) bytes[(row - begin) * rows.column_count + column] = from[row * width];
  }
  for (size_t tree = 0; tree < trees.tree_count; ++tree) {
    const auto root = static_cast<uint32_t>(trees.roots[tree]);
    for (size_t first = begin; first < end; first += kTogether) {
      const size_t count = std::min(kTogether, end - first);
      uint32_t at[kTogether];
      const uint8_t* own[kTogether];
      for (size_t i = 0; i < kTogether; ++i) {
        at[i] = root;
        own[i] = bytes + (first - begin + std::min(i, count - 1)) * rows.column_count;
      }
      for (size_t level = 0; level < walks.depths[tree]; ++level) {
        for (size_t i = 0; i < kTogether; ++i) {
          const Step& step = walks.steps[at[i]];
          at[i] = step.left + !goes_left<kHasCategories>(trees, step, bins, own[i][step.column]);
        }
      }
      for (size_t i = 0; i < count; ++i) body(first + i, tree, at[i]);
    }
  }
}

template <class Body>
void walk_all(const Trees& trees, const BinnedRows& rows, const Bins& bins, Crew& crew, const Body& body) {
  const Walks walks = walks_of(trees, bins);
  const size_t parts = (rows.row_count + kRowsOfPart - 1) / kRowsOfPart, walkers = std::min(parts, crew.size());
  // Not in the threads, which must not throw.
  std::vector<uint8_t> bytes(walkers * kRowsOfPart * rows.column_count);
  std::atomic<size_t> next{0};
  crew.run(walkers, [&](size_t walker) {
    uint8_t* own = bytes.data() + walker * kRowsOfPart * rows.column_count;
    for (size_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
      const size_t begin = part * kRowsOfPart, end = std::min(rows.row_count, begin + kRowsOfPart);
      if (walks.has_categories) {
        walk<true>(trees, walks, rows, bins, begin, end, own, body);
      } else {
        walk<false>(trees, walks, rows, bins, begin, end, own, body);
      }
    }
  });
}

}  // namespace

bool are_sound(const Trees& trees, size_t column_count, size_t score_count) {
  if (trees.roots[0] != 0 || trees.roots[trees.tree_count] != static_cast<int64_t>(trees.node_count)) return false;
  for (size_t tree = 0; tree < trees.tree_count; ++tree) {
    const int64_t root = trees.roots[tree], next = trees.roots[tree + 1];
    if (root < 0 || next <= root || next > static_cast<int64_t>(trees.node_count)) return false;
    const int64_t size = next - root;
    if (trees.scores[tree] < 0 || static_cast<size_t>(trees.scores[tree]) + trees.value_count > score_count) {
      return false;
    }
    for (int64_t node = 0; node < size; ++node) {
      const auto place = static_cast<size_t>(root + node);
      if (trees.column[place] < 0) continue;
      if (static_cast<size_t>(trees.column[place]) >= column_count) return false;
      if (trees.left[place] <= node || int64_t{trees.left[place]} + 1 >= size) return false;
      if (trees.bin[place] < 0 || trees.bin[place] > 255) return false;
    }
  }
  return true;
}

void predict(const Trees& trees, const BinnedRows& rows, const Bins& bins, double* scores, size_t score_count,
             Crew& crew) {
  walk_all(trees, rows, bins, crew, [&](size_t row, size_t tree, size_t leaf) {
    double* to = scores + row * score_count + trees.scores[tree];
    for (size_t k = 0; k < trees.value_count; ++k) to[k] += trees.values[leaf * trees.value_count + k];
  });
}

void find_leaves(const Trees& trees, const BinnedRows& rows, const Bins& bins, int32_t* leaves, Crew& crew) {
  walk_all(trees, rows, bins, crew, [&](size_t row, size_t tree, size_t leaf) {
    leaves[row * trees.tree_count + tree] = static_cast<int32_t>(static_cast<int64_t>(leaf) - trees.roots[tree]);
  });
}

}  // namespace ronde
