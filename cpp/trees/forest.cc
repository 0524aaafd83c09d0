#include "trees/forest.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <queue>
#include <span>
#include <utility>

#include "trees/crew.h"
#include "trees/gradients.h"

namespace ronde {
namespace {

constexpr size_t kMostDraws = 15;         // of a row: more have a probability of 1e-14 at most
constexpr size_t kRowsOfWholeScan = 256;  // of a node: with fewer, the bins that rows have are noted
constexpr size_t kRowsAtOnce = 8192;
constexpr size_t kSums = 4;
constexpr size_t kRowsOfSeveralSums = 128;  // of a node
constexpr size_t kPrefetched = 16;          // rows ahead

// What random numbers are below if a row is drawn at most so often.
std::array<uint64_t, kMostDraws> draw_borders(double rate) {
  std::array<uint64_t, kMostDraws> borders{};
  double term = std::exp(-rate), sum = 0;
  for (size_t i = 0; i < kMostDraws; ++i) {
    sum += term;
    term *= rate / static_cast<double>(i + 1);
    borders[i] = sum >= 1 ? ~uint64_t{0} : static_cast<uint64_t>(std::ldexp(sum, 64));
  }
  return borders;
}

class RandomNumbers {
 public:
  RandomNumbers(uint64_t seed, uint64_t node) : seed_(mixed(seed, node)) {}
  uint64_t below(uint64_t limit) { return mixed(seed_, number_++) % limit; }
  double fraction() { return static_cast<double>(mixed(seed_, number_++) >> 11) * 0x1p-53; }

 private:
  uint64_t seed_, number_ = 0;
};

struct Split {
  double gain = -std::numeric_limits<double>::infinity();
  int32_t column = -1;
  int32_t bin = 0;
  bool missing_left = false;
  std::array<uint64_t, 4> categories{};
};

struct Node {
  size_t begin, end;  // places in the sample
  size_t depth;
  Split split;
};

// How a weight and a count of rows are in one word, and what follows from such words.
struct Words {
  int count_bits;

  int64_t of(int64_t weight) const { return static_cast<int64_t>(static_cast<uint64_t>(weight) << count_bits) | 1; }
  int64_t count(int64_t word) const { return word & ((int64_t{1} << count_bits) - 1); }
  int64_t weight(int64_t word) const { return word >> count_bits; }
};

struct Part {
  int64_t count;
  double weight;
};

// Rows with classes: a histogram has a word for each class.
class ClassTargets {
 public:
  struct Row {
    uint32_t row;
    uint32_t number;
    int64_t word;
  };

  ClassTargets(const ForestRows& all, Criterion criterion, Words words)
      : stride_(all.class_count), is_gini_(criterion == Criterion::kGini), words_(words) {}

  size_t stride() const { return stride_; }
  Row row(const ForestRows& all, uint32_t row, int64_t weight) const {
    return {row, static_cast<uint32_t>(all.y[row]), words_.of(weight)};
  }
  void add(const Row& row, int64_t* sums) const { sums[row.number] += row.word; }
  void add_if(bool is_wanted, const Row& row, int64_t* sums) const { sums[row.number] += is_wanted ? row.word : 0; }
  bool has(const int64_t* sums) const {
    return std::any_of(sums, sums + stride_, [](int64_t word) { return word != 0; });
  }
  bool is_pure(std::span<const Row> rows) const {
    return std::all_of(rows.begin(), rows.end(), [&](const Row& row) { return row.number == rows[0].number; });
  }
  Part part(const int64_t* sums) const {
    Part part{0, 0};
    for (size_t k = 0; k < stride_; ++k) {
      part.count += words_.count(sums[k]);
      part.weight += static_cast<double>(words_.weight(sums[k]));
    }
    return part;
  }
  // Of impurity times weight.
  double gain(const int64_t* left, const int64_t* right, const Part& of_left, const Part& of_right) const {
    const double whole = of_left.weight + of_right.weight;
    double sum = 0;
    if (is_gini_) {
      for (size_t k = 0; k < stride_; ++k) {
        const double difference = weight(left[k]) / of_left.weight - weight(right[k]) / of_right.weight;
        sum += difference * difference;
      }
      return sum * of_left.weight * of_right.weight / whole;
    }
    for (size_t k = 0; k < stride_; ++k) {
      sum += times_log(weight(left[k])) + times_log(weight(right[k])) - times_log(weight(left[k]) + weight(right[k]));
    }
    return sum - times_log(of_left.weight) - times_log(of_right.weight) + times_log(whole);
  }
  // By which categories are ordered: the share of the class that most of the rows of the node have.
  double order(const int64_t* sums, const int64_t* node) const {
    const size_t most = static_cast<size_t>(std::max_element(node, node + stride_) - node);
    return weight(sums[most]) / part(sums).weight;
  }
  void leaf(const ForestRows&, std::span<const Row>, const int64_t* sums, std::vector<double>& values) const {
    const double whole = part(sums).weight;
    for (size_t k = 0; k < stride_; ++k) values.push_back(weight(sums[k]) / whole);
  }

 private:
  double weight(int64_t word) const { return static_cast<double>(words_.weight(word)); }
  static double times_log(double number) { return number > 0 ? number * std::log(number) : 0; }

  size_t stride_;
  bool is_gini_;
  Words words_;
};

// Rows with numbers: a histogram has a word, and the weighted sum of the numbers.
class NumberTargets {
 public:
  struct Row {
    uint32_t row;
    int64_t word;
    int64_t number;
  };

  NumberTargets(const ForestRows&, Criterion, Words words) : words_(words) {}

  static size_t stride() { return 2; }
  Row row(const ForestRows& all, uint32_t row, int64_t weight) const {
    return {row, words_.of(weight), all.integers[row]};
  }
  void add(const Row& row, int64_t* sums) const {
    sums[0] += row.word;
    sums[1] += words_.weight(row.word) * row.number;
  }
  void add_if(bool is_wanted, const Row& row, int64_t* sums) const {
    sums[0] += is_wanted ? row.word : 0;
    sums[1] += is_wanted ? words_.weight(row.word) * row.number : 0;
  }
  bool has(const int64_t* sums) const { return sums[0] != 0; }
  bool is_pure(std::span<const Row> rows) const {
    return std::all_of(rows.begin(), rows.end(), [&](const Row& row) { return row.number == rows[0].number; });
  }
  Part part(const int64_t* sums) const { return {words_.count(sums[0]), static_cast<double>(words_.weight(sums[0]))}; }
  double gain(const int64_t* left, const int64_t* right, const Part& of_left, const Part& of_right) const {
    const double difference =
        static_cast<double>(left[1]) / of_left.weight - static_cast<double>(right[1]) / of_right.weight;
    return difference * difference * of_left.weight * of_right.weight / (of_left.weight + of_right.weight);
  }
  double order(const int64_t* sums, const int64_t*) const { return static_cast<double>(sums[1]) / part(sums).weight; }
  // The mean, such that that of equal numbers is this number.
  void leaf(const ForestRows& all, std::span<const Row> rows, const int64_t* sums, std::vector<double>& values) const {
    const double first = all.y[rows[0].row];
    double sum = 0;
    for (const Row& row : rows) sum += static_cast<double>(words_.weight(row.word)) * (all.y[row.row] - first);
    values.push_back(first + sum / part(sums).weight);
  }

 private:
  Words words_;
};

template <class Targets>
class TreeGrower {
 public:
  using Row = typename Targets::Row;

  TreeGrower(const ForestRows& all, const ForestRules& rules, uint64_t seed)
      : all_(all),
        rules_(rules),
        seed_(seed),
        targets_(all, rules.criterion, Words{static_cast<int>(std::bit_width(all.row_count))}),
        stride_(targets_.stride()),
        histogram_(kMostBins * stride_),
        node_sums_(stride_),
        left_(stride_),
        right_(stride_),
        several_(kSums * stride_),
        columns_(all.column_count) {
    std::iota(columns_.begin(), columns_.end(), 0u);
    take_sample();
    rights_.resize(sample_.size());
    if (rules.is_extra_random) codes_.resize(sample_.size());
    sum_rows({0, sample_.size(), 0, {}});
    whole_ = targets_.part(node_sums_.data()).weight;
  }

  ForestTree grow() {
    append({0, sample_.size(), 0, {}});
    if (rules_.most_leaves > 0) {
      grow_best_first();
    } else {
      grow_depth_first();
    }
    return std::move(tree_);
  }

 private:
  void take_sample() {
    std::vector<uint32_t> counts(all_.row_count);
    count_draws(all_.draws, seed_, counts.data());
    if (std::all_of(counts.begin(), counts.end(), [](uint32_t count) { return count == 0; })) {
      std::copy_n(all_.draws.repeats, all_.row_count, counts.begin());
    }
    for (size_t row = 0; row < all_.row_count; ++row) {
      if (counts[row] == 0) continue;
      sample_.push_back(targets_.row(all_, static_cast<uint32_t>(row), counts[row] * all_.weights[row]));
    }
  }

  void grow_depth_first() {
    std::vector<size_t> open{0};
    while (!open.empty()) {
      const size_t node = open.back();
      open.pop_back();
      if (!find_split(node)) continue;
      split(node);
      open.push_back(nodes_.size() - 1);
      open.push_back(nodes_.size() - 2);
    }
  }

  void grow_best_first() {
    const auto is_worse = [this](size_t a, size_t b) {
      const double gain_a = nodes_[a].split.gain, gain_b = nodes_[b].split.gain;
      return gain_a != gain_b ? gain_a < gain_b : a > b;
    };
    std::priority_queue<size_t, std::vector<size_t>, decltype(is_worse)> open(is_worse);
    if (find_split(0)) open.push(0);
    for (size_t leaves = 1; leaves < rules_.most_leaves && !open.empty(); ++leaves) {
      const size_t node = open.top();
      open.pop();
      split(node);
      const size_t left = nodes_.size() - 2;
      if (find_split(left)) open.push(left);
      if (find_split(left + 1)) open.push(left + 1);
    }
  }

  std::span<const Row> rows_of(const Node& node) const {
    return std::span<const Row>(sample_).subspan(node.begin, node.end - node.begin);
  }

  void sum_rows(const Node& node) {
    std::fill(node_sums_.begin(), node_sums_.end(), 0);
    for (const Row& row : rows_of(node)) targets_.add(row, node_sums_.data());
  }

  // Appends a node as a leaf.
  void append(const Node& node) {
    nodes_.push_back(node);
    sum_rows(node);
    tree_.column.push_back(-1);
    tree_.bin.push_back(0);
    tree_.left.push_back(-1);
    tree_.missing_left.push_back(0);
    tree_.categories.insert(tree_.categories.end(), 4, 0);
    tree_.gain.push_back(0);
    tree_.count.push_back(static_cast<int64_t>(node.end - node.begin));
    targets_.leaf(all_, rows_of(node), node_sums_.data(), tree_.values);
  }

  // Sets the split that gains most among those of the columns drawn. Returns whether there is one.
  bool find_split(size_t number) {
    Node& node = nodes_[number];
    const auto rows = static_cast<int64_t>(node.end - node.begin);
    if (node.depth >= rules_.most_depth || rows < rules_.least_split || rows < 2 * rules_.least_rows) return false;
    if (targets_.is_pure(rows_of(node))) return false;
    sum_rows(node);
    RandomNumbers random(seed_, number);
    bool has_seen_two_bins = false;
    for (size_t i = 0; i < columns_.size() && (i < rules_.columns_of_node || !has_seen_two_bins); ++i) {
      std::swap(columns_[i], columns_[i + random.below(columns_.size() - i)]);
      has_seen_two_bins |= offer_column(node, columns_[i], random);
    }
    if (node.split.column < 0) return false;
    node.split.gain = decrease(node.split.gain);
    return node.split.gain >= rules_.least_decrease;
  }

  double decrease(double gain) const { return std::max(gain, 0.0) * rules_.unit / whole_; }

  // Returns whether the rows of the node have more than one bin of the column.
  bool offer_column(Node& node, uint32_t column, RandomNumbers& random) {
    if (rules_.is_extra_random && !all_.by.is_categorical[column]) return offer_random_border(node, column, random);
    const size_t missing = all_.by.count(column);
    fill_histogram(node, column);
    const bool has_missing = occupied_count_ > 0 && occupied_[occupied_count_ - 1] == missing;
    const size_t present = occupied_count_ - (has_missing ? 1 : 0);
    const bool is_constant = occupied_count_ < 2;
    if (!is_constant) {
      if (all_.by.is_categorical[column]) {
        scan_categories(node, column, random);
      } else {
        scan_numbers(node, column, present, has_missing);
      }
    }
    for (size_t i = 0; i < occupied_count_; ++i) {
      std::fill_n(histogram_.data() + occupied_[i] * stride_, stride_, 0);
    }
    return !is_constant;
  }

  // Sets the histogram, and which bins are occupied, ascending.
  void fill_histogram(const Node& node, uint32_t column) {
    const uint8_t* bins = all_.bins + column * all_.row_count;
    const std::span<const Row> rows = rows_of(node);
    occupied_count_ = 0;
    if (rows.size() >= kRowsOfWholeScan) {
      for (size_t i = 0; i < rows.size(); ++i) {
        if (i + kPrefetched < rows.size()) __builtin_prefetch(bins + rows[i + kPrefetched].row);
        targets_.add(rows[i], histogram_.data() + bins[rows[i].row] * stride_);
      }
      for (size_t b = 0; b < kMostBins; ++b) {
        if (targets_.has(histogram_.data() + b * stride_)) occupied_[occupied_count_++] = static_cast<uint16_t>(b);
      }
      return;
    }
    std::array<uint64_t, 4> seen{};
    for (const Row& row : rows) {
      const uint8_t bin = bins[row.row];
      seen[bin / 64] |= uint64_t{1} << (bin % 64);
      targets_.add(row, histogram_.data() + bin * stride_);
    }
    for (size_t word = 0; word < 4; ++word) {
      for (uint64_t bits = seen[word]; bits != 0; bits &= bits - 1) {
        occupied_[occupied_count_++] = static_cast<uint16_t>(64 * word + static_cast<size_t>(std::countr_zero(bits)));
      }
    }
  }

  const int64_t* sums_of(size_t bin) const { return histogram_.data() + bin * stride_; }

  void add_left(size_t bin) {
    for (size_t k = 0; k < stride_; ++k) left_[k] += sums_of(bin)[k];
  }

  // Takes the split into `left_` and the rest if it is allowed and gains more than the best one so far.
  bool consider(Node& node, uint32_t column) {
    for (size_t k = 0; k < stride_; ++k) right_[k] = node_sums_[k] - left_[k];
    const Part left = targets_.part(left_.data()), right = targets_.part(right_.data());
    if (left.count < rules_.least_rows || right.count < rules_.least_rows) return false;
    const double least = std::max(rules_.least_weight * whole_, std::numeric_limits<double>::min());
    if (left.weight < least || right.weight < least) return false;
    const double gain = targets_.gain(left_.data(), right_.data(), left, right);
    if (!(gain > node.split.gain)) return false;
    node.split.gain = gain;
    node.split.column = static_cast<int32_t>(column);
    node.split.missing_left = left.count > right.count;  // where most rows are
    return true;
  }

  void scan_numbers(Node& node, uint32_t column, size_t present, bool has_missing) {
    // A border lies behind an occupied bin. With missing values there is one more, behind the last one.
    const size_t last = has_missing ? present : present - 1;
    for (const bool missing_left : {false, true}) {
      if (missing_left && !has_missing) return;
      std::fill(left_.begin(), left_.end(), 0);
      if (missing_left) add_left(occupied_[present]);
      for (size_t i = 0; i < last; ++i) {
        add_left(occupied_[i]);
        if (!consider(node, column)) continue;
        const int32_t bin = occupied_[i];
        const int32_t next = i + 1 < present ? occupied_[i + 1] : bin + 1;
        node.split.bin = (bin + next - 1) / 2;
        if (has_missing) node.split.missing_left = missing_left;
      }
    }
  }

  // One border needs no histogram: the least and the largest bin of the rows, and the sums of the rows below it.
  // Returns as offer_column().
  bool offer_random_border(Node& node, uint32_t column, RandomNumbers& random) {
    const uint8_t* bins = all_.bins + column * all_.row_count;
    const std::span<const Row> rows = rows_of(node);
    const auto missing = static_cast<uint8_t>(all_.by.count(column));
    uint8_t first = missing, last = 0;
    bool has_missing = false;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i + kPrefetched < rows.size()) __builtin_prefetch(bins + rows[i + kPrefetched].row);
      const uint8_t bin = bins[rows[i].row];
      codes_[i] = bin;
      has_missing |= bin == missing;
      first = std::min(first, bin);
      last = std::max(last, bin == missing ? uint8_t{0} : bin);
    }
    if (first == missing || (first == last && !has_missing)) return false;
    const int32_t border = first < last ? draw_bin(column, first, last, random) : first;
    std::fill(left_.begin(), left_.end(), 0);
    add_rows_if(rows, [this, border](size_t i) { return codes_[i] <= border; });
    for (const bool missing_left : {false, true}) {
      if (missing_left && !has_missing) break;
      if (missing_left) add_rows_if(rows, [this, missing](size_t i) { return codes_[i] == missing; });
      if (!consider(node, column)) continue;
      node.split.bin = border;
      if (has_missing) node.split.missing_left = missing_left;
    }
    return true;
  }

  // Adds some of the rows to `left_`. Rows next to each other go to different sums, so that none waits for another.
  template <class Condition>
  void add_rows_if(std::span<const Row> rows, Condition is_wanted) {
    size_t i = 0;
    if (rows.size() >= kRowsOfSeveralSums) {
      std::fill(several_.begin(), several_.end(), 0);
      for (; i + kSums <= rows.size(); i += kSums) {
        for (size_t k = 0; k < kSums; ++k)
          targets_.add_if(is_wanted(i + k), rows[i + k], several_.data() + k * stride_);
      }
      for (size_t k = 0; k < several_.size(); ++k) left_[k % stride_] += several_[k];
    }
    for (; i < rows.size(); ++i) targets_.add_if(is_wanted(i), rows[i], left_.data());
  }

  // A bin from the first to the last but one: the border behind it is next to a random value between the least and the
  // largest one of the rows.
  int32_t draw_bin(uint32_t column, int32_t first, int32_t largest, RandomNumbers& random) const {
    const int32_t last = largest - 1;
    const double* lows = all_.lows + column * kMostBins;
    const double* highs = all_.highs + column * kMostBins;
    const double low = lows[first], high = highs[largest];
    const double part = random.fraction(), drawn = low * (1 - part) + high * part;
    if (!std::isfinite(drawn)) return first + static_cast<int32_t>(random.below(uint64_t(last - first + 1)));
    const double* borders = all_.by.values + all_.by.starts[column];
    const auto count = static_cast<int32_t>(all_.by.count(column)) - 1;
    const auto bin = static_cast<int32_t>(std::lower_bound(borders, borders + count, drawn) - borders);
    // Values of one bin stay together: the border is the nearer one of the bin's.
    return std::clamp(drawn - lows[bin] < highs[bin] - drawn ? bin - 1 : bin, first, last);
  }

  // The categories in an order, that of their means or a random one: the first ones go left.
  void scan_categories(Node& node, uint32_t column, RandomNumbers& random) {
    std::array<std::pair<double, uint16_t>, kMostBins> order;
    for (size_t i = 0; i < occupied_count_; ++i) {
      const uint16_t bin = occupied_[i];
      order[i] = {rules_.is_extra_random ? random.fraction() : targets_.order(sums_of(bin), node_sums_.data()), bin};
    }
    std::sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(occupied_count_));
    size_t first = 0, last = occupied_count_ - 1;
    if (rules_.is_extra_random) {
      first = random.below(last);
      last = first + 1;
    }
    const size_t missing = all_.by.count(column);
    std::array<uint64_t, 4> categories{};
    std::fill(left_.begin(), left_.end(), 0);
    for (size_t i = 0; i < last; ++i) {
      const size_t bin = order[i].second;
      add_left(bin);
      categories[bin / 64] |= uint64_t{1} << (bin % 64);
      if (i < first || !consider(node, column)) continue;
      node.split.categories = categories;
      if (occupied_[occupied_count_ - 1] == missing) {
        node.split.missing_left = (categories[missing / 64] >> (missing % 64)) & 1;
      }
    }
  }

  void split(size_t number) {
    const Node node = nodes_[number];
    const size_t border = partition(node);
    const bool is_category = all_.by.is_categorical[node.split.column] != 0;
    tree_.column[number] = node.split.column;
    tree_.bin[number] = is_category ? 0 : node.split.bin;
    tree_.left[number] = static_cast<int32_t>(nodes_.size());
    tree_.missing_left[number] = node.split.missing_left;
    if (is_category) std::copy_n(node.split.categories.begin(), 4, tree_.categories.begin() + 4 * ptrdiff_t(number));
    tree_.gain[number] = node.split.gain;
    const size_t width = tree_.values.size() / nodes_.size();
    std::fill_n(tree_.values.begin() + static_cast<std::ptrdiff_t>(width * number), width, 0.0);
    append({node.begin, border, node.depth + 1, {}});
    append({border, node.end, node.depth + 1, {}});
  }

  // Returns the place of the first row that goes right. The rows of both sides keep their order.
  size_t partition(const Node& node) {
    const auto column = static_cast<size_t>(node.split.column);
    const uint8_t* bins = all_.bins + column * all_.row_count;
    uint8_t goes_left[kMostBins];
    for (size_t b = 0; b < kMostBins; ++b) {
      goes_left[b] = all_.by.is_categorical[column] ? (node.split.categories[b / 64] >> (b % 64)) & 1
                                                    : static_cast<int32_t>(b) <= node.split.bin;
    }
    goes_left[all_.by.count(column)] = node.split.missing_left;
    Row* left = sample_.data() + node.begin;
    Row* right = rights_.data();
    for (size_t i = node.begin; i < node.end; ++i) {
      const Row row = sample_[i];
      const uint8_t is_left = goes_left[bins[row.row]];
      *left = row;
      *right = row;
      left += is_left;
      right += 1 - is_left;
    }
    std::copy(rights_.data(), right, left);
    return static_cast<size_t>(left - sample_.data());
  }

  const ForestRows& all_;
  const ForestRules& rules_;
  const uint64_t seed_;
  const Targets targets_;
  const size_t stride_;
  std::vector<Row> sample_, rights_;
  std::vector<uint8_t> codes_;  // bins of the rows of a node
  std::vector<int64_t> histogram_, node_sums_, left_, right_, several_;
  std::array<uint16_t, kMostBins> occupied_;
  size_t occupied_count_ = 0;
  std::vector<uint32_t> columns_;
  std::vector<Node> nodes_;
  double whole_ = 0;
  ForestTree tree_;
};

template <class Targets>
ForestTree grow_one(const ForestRows& rows, const ForestRules& rules, uint64_t seed) {
  return TreeGrower<Targets>(rows, rules, seed).grow();
}

}  // namespace

void identify_rows(const uint8_t* bins, size_t row_count, size_t column_count, uint64_t* identities, Crew& crew) {
  crew.run((row_count + kRowsAtOnce - 1) / kRowsAtOnce, [&](size_t part) {
    const size_t begin = part * kRowsAtOnce, end = std::min(row_count, begin + kRowsAtOnce);
    for (size_t row = begin; row < end; ++row) identities[row] = 0;
    for (size_t column = 0; column < column_count; ++column) {
      const uint8_t* own = bins + column * row_count;
      for (size_t row = begin; row < end; ++row) {
        identities[row] = std::rotl((identities[row] ^ (own[row] + 1u)) * 0x9e3779b97f4a7c15u, 29);
      }
    }
    for (size_t row = begin; row < end; ++row) identities[row] = mixed(identities[row], 0);
  });
}

void count_draws(const Draws& draws, uint64_t seed, uint32_t* counts) {
  if (draws.rate == 0) {
    std::copy_n(draws.repeats, draws.row_count, counts);
    return;
  }
  const auto borders = draw_borders(draws.rate);
  for (size_t row = 0; row < draws.row_count; ++row) {
    counts[row] = 0;
    for (uint32_t i = 0; i < draws.repeats[row]; ++i) {
      const uint64_t random = mixed(seed ^ draws.identities[row], uint64_t{draws.firsts[row]} + i);
      uint32_t drawn = 0;
      while (drawn < kMostDraws && random >= borders[drawn]) ++drawn;
      counts[row] += drawn;
    }
  }
}

std::vector<ForestTree> grow_forest(const ForestRows& rows, const ForestRules& rules, const uint64_t* seeds,
                                    size_t tree_count, Crew& crew) {
  std::vector<ForestTree> trees(tree_count);
  std::atomic<bool> lacks_memory{false};
  crew.run(tree_count, [&](size_t tree) {
    try {
      trees[tree] = rows.class_count > 0 ? grow_one<ClassTargets>(rows, rules, seeds[tree])
                                         : grow_one<NumberTargets>(rows, rules, seeds[tree]);
    } catch (const std::bad_alloc&) {
      lacks_memory = true;
    }
  });
  if (lacks_memory) throw std::bad_alloc();
  return trees;
}

}  // namespace ronde
