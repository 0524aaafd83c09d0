#include "trees/growing.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <queue>
#include <span>
#include <utility>
#include <vector>

#include "trees/crew.h"

namespace ronde {
namespace {

constexpr size_t kPrefetched = 24;            // rows ahead
constexpr size_t kRowsForThreads = 4096;      // of a leaf: with fewer, waking threads takes longer
constexpr size_t kBinsForThreads = 1 << 14;   // of a histogram, likewise
constexpr size_t kRowsOfPartition = 1 << 15;  // of a leaf, likewise
constexpr int64_t kLeastCategoryRows = 10;
constexpr double kCategorySmoothing = 10;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Sums {
  int64_t gradient = 0;
  int64_t hessian = 0;
  int64_t count = 0;

  Sums operator+(const Sums& other) const {
    return {gradient + other.gradient, hessian + other.hessian, count + other.count};
  }
  Sums operator-(const Sums& other) const {
    return {gradient - other.gradient, hessian - other.hessian, count - other.count};
  }
};

// To the 24 bits of a float, so that of splits that gain the same but for rounding the first one is taken; but with the
// range of a double, since targets can be so large or small that squares of their sums are outside that of a float.
double rounded_gain(double gain) {
  constexpr int kDropped = 29;
  const uint64_t half = uint64_t{1} << (kDropped - 1);
  return std::bit_cast<double>((std::bit_cast<uint64_t>(gain) + half) >> kDropped << kDropped);
}

struct Split {
  double gain = 0;  // as of `rounded_gain`
  int32_t column = -1;
  int32_t bin = -1;
  bool missing_left = false;
  std::array<uint64_t, 4> categories{};
  Sums left;
};

struct Node {
  size_t begin = 0, end = 0;  // places in the permutation
  size_t depth = 0;
  Sums sums;
  double low = -kInfinity, high = kInfinity;
  Split split;
  std::vector<uint32_t> groups;  // those with all columns on the path; not of the root
  std::unique_ptr<int64_t[]> histogram;
};

// The histograms of a node: for all bins of all columns the gradients, then for all the hessians and counts, packed.
class Layout {
 public:
  explicit Layout(const TreeRows& all) : starts_(all.rows.column_count + 1) {
    for (size_t c = 0; c < all.rows.column_count; ++c) starts_[c + 1] = starts_[c] + all.bins.count(c) + 1;
    count_bits_ = std::bit_width(all.rows_of_all_tasks);
    count_mask_ = (int64_t{1} << count_bits_) - 1;
  }

  size_t start(size_t column) const { return starts_[column]; }
  size_t bins() const { return starts_.back(); }
  size_t numbers() const { return 2 * bins(); }
  int count_bits() const { return count_bits_; }
  Sums at(const int64_t* histogram, size_t place) const {
    const int64_t rest = histogram[bins() + place];
    return {histogram[place], rest >> count_bits_, rest & count_mask_};
  }

 private:
  std::vector<size_t> starts_;
  int count_bits_;
  int64_t count_mask_;
};

// Adds the integers of rows to the bins of kWidth columns.
template <size_t kWidth>
void add_rows(const uint8_t* bins, const uint32_t* rows, size_t count, const int64_t* integers, int64_t* sums) {
  const size_t ahead = count > kPrefetched ? count - kPrefetched : 0;
  const auto add = [&](size_t i) {
    const int64_t integer = integers[rows[i]];
    const uint8_t* row = bins + size_t{rows[i]} * kWidth;
#pragma GCC unroll 16
    for (size_t j = 0; j < kWidth; ++j) sums[j * kMostBins + row[j]] += integer;
  };
  size_t i = 0;
  for (; i < ahead; ++i) {
    __builtin_prefetch(bins + size_t{rows[i + kPrefetched]} * kWidth);
    __builtin_prefetch(integers + rows[i + kPrefetched]);
    add(i);
  }
  for (; i < count; ++i) add(i);
}

using AddRows = void (*)(const uint8_t*, const uint32_t*, size_t, const int64_t*, int64_t*);

template <size_t... kNumbers>
constexpr std::array<AddRows, sizeof...(kNumbers)> all_widths(std::index_sequence<kNumbers...>) {
  return {add_rows<kNumbers + 1>...};
}

constexpr auto kAddRows = all_widths(std::make_index_sequence<kWidestGroup>());

class Grower {
 public:
  Grower(const TreeRows& all, const TreeRules& rules, const SumOverTasks& sum_over_tasks, uint32_t* permutation,
         Crew& crew)
      : all_(all),
        rules_(rules),
        sum_over_tasks_(sum_over_tasks),
        permutation_(permutation),
        crew_(crew),
        layout_(all),
        groups_(groups_of(all.rows.column_count)),
        block_sums_(std::make_unique<int64_t[]>(std::max<size_t>(1, groups_.count) * kWidestGroup * kMostBins)),
        scratch_(std::make_unique_for_overwrite<uint32_t[]>(all.rows.row_count)),
        best_(all.rows.column_count) {
    std::iota(permutation_, permutation_ + all.rows.row_count, 0u);
  }

  std::vector<Node> grow() {
    std::vector<Node> nodes;
    nodes.reserve(2 * std::min<size_t>(rules_.most_leaves, 4096));
    nodes.emplace_back();
    nodes[0].end = all_.rows.row_count;
    nodes[0].histogram = build(0, all_.rows.row_count);
    for (size_t b = 0; b <= all_.bins.count(0); ++b) {
      nodes[0].sums = nodes[0].sums + layout_.at(nodes[0].histogram.get(), b);
    }
    const auto is_worse = [&nodes](size_t a, size_t b) {
      const double gain_a = nodes[a].split.gain, gain_b = nodes[b].split.gain;
      return gain_a != gain_b ? gain_a < gain_b : a > b;
    };
    std::priority_queue<size_t, std::vector<size_t>, decltype(is_worse)> open(is_worse);
    const auto offer = [&](size_t node) {
      if (can_split(nodes[node])) find_split(nodes[node], node);
      if (nodes[node].split.column >= 0) {
        open.push(node);
      } else {
        nodes[node].histogram.reset();
      }
    };
    offer(0);
    for (size_t leaves = 1; leaves < rules_.most_leaves && !open.empty(); ++leaves) {
      const size_t parent = open.top();
      open.pop();
      split(nodes, parent);
      const size_t left = nodes.size() - 2;
      if (leaves + 1 < rules_.most_leaves) {
        make_histograms(nodes[parent], nodes[left], nodes[left + 1]);
        offer(left);
        offer(left + 1);
      }
      nodes[parent].histogram.reset();
    }
    return nodes;
  }

  // The number of the left part of each node that is split, by node.
  const std::vector<int32_t>& lefts() const { return lefts_; }

 private:
  bool can_split(const Node& node) const {
    return node.depth < rules_.most_depth && node.sums.count >= 2 * rules_.least_rows;
  }

  double gradient(const Sums& sums) const { return static_cast<double>(sums.gradient) / all_.gradient_scale; }
  double hessian(const Sums& sums) const { return static_cast<double>(sums.hessian) / all_.hessian_scale; }

  double shrunk(double gradient) const {
    return std::copysign(std::max(std::abs(gradient) - rules_.l1, 0.0), gradient);
  }

  double value(const Sums& sums, double low, double high) const {
    const double curvature = hessian(sums) + rules_.l2;
    const double unbounded = curvature > 0 ? -shrunk(gradient(sums)) / curvature : 0;
    return std::min(std::max(unbounded, low), high);
  }

  // Twice what the best value within the bounds lowers the loss by.
  double score(const Sums& sums, const Node& node) const {
    const double g = gradient(sums), curvature = hessian(sums) + rules_.l2;
    if (rules_.monotone == nullptr) {
      const double slope = rules_.l1 == 0 ? g : shrunk(g);
      return curvature > 0 ? slope * slope / curvature : 0;
    }
    const double v = value(sums, node.low, node.high);
    return -(2 * g * v + curvature * v * v + 2 * rules_.l1 * std::abs(v));
  }

  // Histograms of the rows of all tasks at these places.
  std::unique_ptr<int64_t[]> build(size_t begin, size_t end) {
    auto histogram = std::make_unique_for_overwrite<int64_t[]>(layout_.numbers());
    const auto body = [&](size_t group) { build_group(group, begin, end, histogram.get()); };
    if (end - begin >= kRowsForThreads) {
      crew_.run(groups_.count, body);
    } else {
      for (size_t group = 0; group < groups_.count; ++group) body(group);
    }
    if (sum_over_tasks_) sum_over_tasks_(histogram.get(), layout_.numbers());
    return histogram;
  }

  void build_group(size_t group, size_t begin, size_t end, int64_t* histogram) {
    int64_t* sums = block_sums_.get() + group * kWidestGroup * kMostBins;
    const uint8_t* bins = all_.rows.bins + group * all_.rows.row_count * groups_.width;
    const AddRows add = kAddRows[groups_.width - 1];
    size_t at = begin;
    do {
      const size_t count = std::min(end - at, all_.packing.block_rows);
      add(bins, permutation_ + at, count, all_.integers, sums);
      move_sums(group, sums, histogram, at == begin);
      at += count;
    } while (at < end);
  }

  // Moves the sums of a block to the histograms.
  void move_sums(size_t group, int64_t* sums, int64_t* histogram, bool is_first) const {
    const int shift = all_.packing.count_bits + all_.packing.hessian_bits;
    const int count_bits = all_.packing.count_bits, wide = layout_.count_bits();
    const int64_t count_mask = (int64_t{1} << count_bits) - 1;
    const int64_t hessian_mask = (int64_t{1} << all_.packing.hessian_bits) - 1;
    for (size_t j = 0; j < groups_.width; ++j) {
      const size_t column = group * groups_.width + j;
      int64_t* from = sums + j * kMostBins;
      if (column < all_.rows.column_count) {
        const size_t count = all_.bins.count(column) + 1;
        int64_t* gradients = histogram + layout_.start(column);
        int64_t* rest = gradients + layout_.bins();
        for (size_t b = 0; b < count; ++b) {
          const int64_t sum = from[b];
          const int64_t gradient = sum >> shift;
          const int64_t others = (((sum >> count_bits) & hessian_mask) << wide) + (sum & count_mask);
          gradients[b] = is_first ? gradient : gradients[b] + gradient;
          rest[b] = is_first ? others : rest[b] + others;
        }
        std::memset(from, 0, count * sizeof *from);
      } else {
        from[0] = 0;
      }
    }
  }

  void make_histograms(Node& parent, Node& left, Node& right) {
    if (!can_split(left) && !can_split(right)) return;
    Node& smaller = left.sums.count <= right.sums.count ? left : right;
    Node& larger = &smaller == &left ? right : left;
    smaller.histogram = build(smaller.begin, smaller.end);
    larger.histogram = std::move(parent.histogram);
    int64_t* __restrict whole = larger.histogram.get();
    const int64_t* __restrict part = smaller.histogram.get();
    for (size_t i = 0; i < layout_.numbers(); ++i) whole[i] -= part[i];
  }

  // Sets the split that gains most, if one gains enough.
  void find_split(Node& node, size_t number) {
    choose_columns(node, number);
    const auto body = [&](size_t i) { best_[i] = best_of_column(node, columns_[i], number); };
    if (layout_.bins() >= kBinsForThreads) {
      crew_.run(columns_.size(), body);
    } else {
      for (size_t i = 0; i < columns_.size(); ++i) body(i);
    }
    for (size_t i = 0; i < columns_.size(); ++i) {
      if (best_[i].gain > node.split.gain) node.split = best_[i];
    }
  }

  // Sets columns_, ascending.
  void choose_columns(const Node& node, size_t number) {
    const bool is_restricted = rules_.group_starts != nullptr && node.depth > 0;
    const size_t all = all_.rows.column_count;
    if (columns_.empty() || rules_.columns_of_node < all || rules_.group_starts != nullptr) {
      columns_.clear();
      for (size_t c = 0; !is_restricted && c < all; ++c) columns_.push_back(c);
      for (const uint32_t group : node.groups) {
        const std::span<const int32_t> some = columns_of(group);
        columns_.insert(columns_.end(), some.begin(), some.end());
      }
      std::sort(columns_.begin(), columns_.end());
      columns_.erase(std::unique(columns_.begin(), columns_.end()), columns_.end());
    }
    const size_t count = columns_.size();
    const size_t chosen = std::max<size_t>(1, rules_.columns_of_node * count / all);
    if (chosen >= count) return;
    const uint64_t seed = mixed(rules_.seed, number);
    for (size_t i = 0; i < chosen; ++i) std::swap(columns_[i], columns_[i + mixed(seed, i) % (count - i)]);
    columns_.resize(chosen);
    std::sort(columns_.begin(), columns_.end());
  }

  std::span<const int32_t> columns_of(uint32_t group) const {
    const int64_t* start = rules_.group_starts + group;
    return {rules_.group_columns + start[0], rules_.group_columns + start[1]};
  }

  // The groups of a node's parts.
  std::vector<uint32_t> remaining_groups(const Node& node) const {
    std::vector<uint32_t> remaining;
    if (rules_.group_starts == nullptr) return remaining;
    const size_t count = node.depth == 0 ? rules_.group_count : node.groups.size();
    for (size_t i = 0; i < count; ++i) {
      const uint32_t group = node.depth == 0 ? static_cast<uint32_t>(i) : node.groups[i];
      const std::span<const int32_t> columns = columns_of(group);
      if (std::binary_search(columns.begin(), columns.end(), node.split.column)) remaining.push_back(group);
    }
    return remaining;
  }

  // What a split of the node has to gain more than: rounding at random lets equal rows seem to differ.
  double least_gain(const Node& node) const {
    const double curvature = hessian(node.sums) + rules_.l2;
    const double noise =
        curvature > 0 ? static_cast<double>(node.sums.count) / (all_.gradient_scale * all_.gradient_scale * curvature)
                      : 0;
    return std::max(rules_.least_gain, noise);
  }

  struct Offer {
    const Node& node;
    double own_score;
    double least_gain;
    int sign;
    Split best;
  };

  // Takes a split if it is allowed and gains more than the best one so far.
  bool consider(Offer& offer, const Sums& left) const {
    const Sums right = offer.node.sums - left;
    if (left.count < rules_.least_rows || right.count < rules_.least_rows) return false;
    if (hessian(left) < rules_.least_hessian || hessian(right) < rules_.least_hessian) return false;
    if (offer.sign != 0) {
      const double difference =
          value(right, offer.node.low, offer.node.high) - value(left, offer.node.low, offer.node.high);
      if (difference * offer.sign < 0) return false;
    }
    const double gain = score(left, offer.node) + score(right, offer.node) - offer.own_score;
    if (!(gain > offer.least_gain)) return false;
    const double rounded = rounded_gain(gain);
    if (!(rounded > offer.best.gain)) return false;
    offer.best.gain = rounded;
    offer.best.left = left;
    return true;
  }

  Split best_of_column(const Node& node, size_t column, size_t number) const {
    const int sign = rules_.monotone == nullptr ? 0 : rules_.monotone[column];
    Offer offer{node, score(node.sums, node), least_gain(node), sign, {}};
    if (all_.bins.is_categorical[column]) {
      scan_categories(offer, column);
    } else {
      scan_numbers(offer, column, number);
    }
    if (offer.best.gain > 0) offer.best.column = static_cast<int32_t>(column);
    return offer.best;
  }

  void scan_numbers(Offer& offer, size_t column, size_t number) const {
    const int64_t* histogram = offer.node.histogram.get();
    const size_t start = layout_.start(column), count = all_.bins.count(column);
    const Sums missing = layout_.at(histogram, start + count);
    size_t first = 0, last = count;
    if (rules_.is_extra_random) {
      while (first < count && layout_.at(histogram, start + first).count == 0) ++first;
      while (last > first && layout_.at(histogram, start + last - 1).count == 0) --last;
      if (last - first < 2 && missing.count == 0) return;
      first = first + (last - first < 2 ? 0 : mixed(mixed(rules_.seed, number), ~column) % (last - first - 1));
      last = first + 1;
    }
    scan_borders(offer, column, Sums{}, first, last, false, missing);
    if (missing.count > 0) scan_borders(offer, column, missing, first, last, true, missing);
  }

  void scan_borders(Offer& offer, size_t column, Sums left, size_t first, size_t last, bool missing_left,
                    const Sums& missing) const {
    const int64_t* histogram = offer.node.histogram.get();
    const size_t start = layout_.start(column);
    for (size_t b = 0; b < last; ++b) {
      const Sums bin = layout_.at(histogram, start + b);
      left = left + bin;
      if (b < first || (bin.count == 0 && !rules_.is_extra_random)) continue;
      if (offer.node.sums.count - left.count < rules_.least_rows) break;
      if (left.count < rules_.least_rows || !consider(offer, left)) continue;
      offer.best.bin = static_cast<int32_t>(b);
      offer.best.missing_left =
          missing.count > 0 ? missing_left : 2 * left.count > offer.node.sums.count;  // where most rows are
    }
  }

  // The categories in the order of their mean gradients; the first ones go left, rare ones right.
  void scan_categories(Offer& offer, size_t column) const {
    const int64_t* histogram = offer.node.histogram.get();
    const size_t start = layout_.start(column), count = all_.bins.count(column);
    std::array<std::pair<double, uint16_t>, kMostBins> order;
    size_t used = 0;
    for (size_t b = 0; b <= count; ++b) {
      const Sums bin = layout_.at(histogram, start + b);
      if (bin.count < std::min(kLeastCategoryRows, rules_.least_rows)) continue;
      order[used++] = {gradient(bin) / (hessian(bin) + kCategorySmoothing), static_cast<uint16_t>(b)};
    }
    std::sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(used));
    for (const bool is_reversed : {false, true}) {
      Sums left;
      std::array<uint64_t, 4> categories{};
      for (size_t i = 0; i < used; ++i) {
        const size_t bin = order[is_reversed ? used - 1 - i : i].second;
        left = left + layout_.at(histogram, start + bin);
        categories[bin / 64] |= uint64_t{1} << (bin % 64);
        if (!consider(offer, left)) continue;
        offer.best.categories = categories;
        const bool has_missing = layout_.at(histogram, start + count).count > 0;
        const bool is_missing_left = (categories[count / 64] >> (count % 64)) & 1;
        offer.best.missing_left = has_missing ? is_missing_left : 2 * left.count > offer.node.sums.count;
      }
    }
  }

  // Appends the two parts of a node, and sorts its rows by them.
  void split(std::vector<Node>& nodes, size_t parent) {
    const size_t left = nodes.size();
    nodes.resize(left + 2);
    lefts_.resize(left + 2, -1);
    lefts_[parent] = static_cast<int32_t>(left);
    Node& node = nodes[parent];
    const size_t border = partition(node);
    const std::vector<uint32_t> groups = remaining_groups(node);
    for (const size_t side : {size_t{0}, size_t{1}}) {
      Node& part = nodes[left + side];
      part.begin = side == 0 ? node.begin : border;
      part.end = side == 0 ? border : node.end;
      part.depth = node.depth + 1;
      part.groups = groups;
      part.sums = side == 0 ? node.split.left : node.sums - node.split.left;
      part.low = node.low;
      part.high = node.high;
    }
    const int sign = rules_.monotone == nullptr ? 0 : rules_.monotone[node.split.column];
    if (sign != 0) {
      const double middle =
          (value(nodes[left].sums, node.low, node.high) / 2 + value(nodes[left + 1].sums, node.low, node.high) / 2);
      (sign > 0 ? nodes[left].high : nodes[left].low) = middle;
      (sign > 0 ? nodes[left + 1].low : nodes[left + 1].high) = middle;
    }
  }

  // Returns the place of the first row that goes right. The rows of both sides keep their order.
  size_t partition(const Node& node) {
    const auto column = static_cast<size_t>(node.split.column);
    const uint8_t* bins = all_.rows.column(column);
    uint8_t goes_left[kMostBins];
    const size_t missing = all_.bins.count(column);
    for (size_t b = 0; b < kMostBins; ++b) {
      goes_left[b] = all_.bins.is_categorical[column] ? (node.split.categories[b / 64] >> (b % 64)) & 1
                                                      : static_cast<int32_t>(b) <= node.split.bin;
    }
    goes_left[missing] = node.split.missing_left;
    const size_t rows = node.end - node.begin, parts = rows < kRowsOfPartition ? 1 : crew_.size();
    std::vector<size_t> lefts(parts);
    const auto border = [&](size_t part) { return node.begin + rows * part / parts; };
    crew_.run(parts,
              [&](size_t part) { lefts[part] = partition_some(bins, goes_left, border(part), border(part + 1)); });
    size_t at = node.begin;
    for (size_t part = 0; part < parts; at += lefts[part++]) {
      std::copy_n(permutation_ + border(part), lefts[part], permutation_ + at);
    }
    const size_t found = at;
    for (size_t part = 0; part < parts; ++part) {
      const size_t count = border(part + 1) - border(part) - lefts[part];
      std::copy_n(scratch_.get() + border(part), count, permutation_ + at);
      at += count;
    }
    return found;
  }

  // Moves the rows that go left to the beginning, and the others to the scratch memory. Returns how many go left.
  size_t partition_some(const uint8_t* bins, const uint8_t* goes_left, size_t begin, size_t end) {
    uint32_t* lefts = permutation_ + begin;
    uint32_t* rights = scratch_.get() + begin;
    const size_t width = groups_.width;
    for (size_t i = begin; i < end; ++i) {
      if (i + kPrefetched < end) __builtin_prefetch(bins + size_t{permutation_[i + kPrefetched]} * width);
      const uint32_t row = permutation_[i];
      const uint8_t is_left = goes_left[bins[size_t{row} * width]];
      *lefts = row;
      *rights = row;
      lefts += is_left;
      rights += 1 - is_left;
    }
    return static_cast<size_t>(lefts - (permutation_ + begin));
  }

  const TreeRows& all_;
  const TreeRules& rules_;
  const SumOverTasks& sum_over_tasks_;
  uint32_t* permutation_;
  Crew& crew_;
  const Layout layout_;
  const ColumnGroups groups_;
  const std::unique_ptr<int64_t[]> block_sums_;  // by group
  const std::unique_ptr<uint32_t[]> scratch_;
  std::vector<Split> best_;
  std::vector<size_t> columns_;
  std::vector<int32_t> lefts_{-1};
};

}  // namespace

size_t grow_tree(const TreeRows& rows, const TreeRules& rules, const SumOverTasks& sum_over_tasks, const TreeNodes& to,
                 uint32_t* permutation, Crew& crew) {
  Grower grower(rows, rules, sum_over_tasks, permutation, crew);
  const std::vector<Node> nodes = grower.grow();
  for (size_t i = 0; i < nodes.size(); ++i) {
    const Node& node = nodes[i];
    const bool is_leaf = grower.lefts()[i] < 0;
    to.column[i] = is_leaf ? -1 : node.split.column;
    to.bin[i] = is_leaf ? 0 : std::max(node.split.bin, 0);
    to.left[i] = grower.lefts()[i];
    to.missing_left[i] = !is_leaf && node.split.missing_left;
    for (size_t j = 0; j < 4; ++j) to.categories[4 * i + j] = is_leaf ? 0 : node.split.categories[j];
    to.gain[i] = is_leaf ? 0 : node.split.gain;
    to.count[i] = node.sums.count;
    to.bounds[2 * i] = node.low;
    to.bounds[2 * i + 1] = node.high;
    to.rows[2 * i] = static_cast<int64_t>(node.begin);
    to.rows[2 * i + 1] = static_cast<int64_t>(node.end);
  }
  return nodes.size();
}

}  // namespace ronde
