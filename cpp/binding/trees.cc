// The Python binding of trees, for ronde/ml/trees. What a file of a model can contain is checked here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "binding/border.h"
#include "trees/binned_rows.h"
#include "trees/crew.h"
#include "trees/forest.h"
#include "trees/gradients.h"
#include "trees/growing.h"
#include "trees/leaves.h"
#include "trees/prediction.h"
#include "trees/ranking.h"
#include "trees/shap.h"

namespace ronde {
namespace {

template <class T>
using Flat = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Table = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using AnyTable = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check(bool condition, const char* what) {
  if (!condition) raise("UsageError", std::string("the arrays of trees do not match: ") + what);
}

template <class T>
T* pointer(const std::optional<Flat<T>>& array, size_t size) {
  if (!array) return nullptr;
  check(array->shape(0) == size, "an optional array has another length");
  return array->data();
}

// Raises UsageError unless the bins can be numbers of one byte.
Bins checked_bins(const Flat<const double>& values, const Flat<const int64_t>& starts,
                  const Flat<const uint8_t>& is_categorical) {
  check(starts.shape(0) == is_categorical.shape(0) + 1 && is_categorical.shape(0) > 0, "columns of the bins");
  const int64_t* start = starts.data();
  check(start[0] == 0 && start[is_categorical.shape(0)] == static_cast<int64_t>(values.shape(0)), "starts of bins");
  for (size_t c = 0; c < is_categorical.shape(0); ++c) {
    check(start[c] <= start[c + 1] && start[c + 1] - start[c] <= 254, "number of bins");
  }
  return {values.data(), start, is_categorical.data()};
}

BinnedRows checked_rows(const Flat<const uint8_t>& bins, size_t row_count, size_t column_count) {
  const ColumnGroups groups = groups_of(column_count);
  check(bins.shape(0) == groups.count * groups.width * row_count && row_count <= UINT32_MAX, "bytes of binned rows");
  return {bins.data(), row_count, column_count};
}

void bin_table(const AnyTable& X, const Flat<const double>& values, const Flat<const int64_t>& starts,
               const Flat<const uint8_t>& is_categorical, const Flat<uint8_t>& bins, size_t threads) {
  const bool is_float = X.dtype() == nb::dtype<float>();
  check(is_float || X.dtype() == nb::dtype<double>(), "X is neither float32 nor float64");
  check(X.shape(1) == is_categorical.shape(0), "columns of X");
  const Bins by = checked_bins(values, starts, is_categorical);
  const ColumnGroups groups = groups_of(X.shape(1));
  check(bins.shape(0) == groups.count * groups.width * X.shape(0), "bytes of binned rows");
  const ReleaseGil released;
  Crew crew(threads);
  bin_rows(is_float ? DType::kFloat32 : DType::kFloat64, X.data(), X.shape(0), X.shape(1), by, bins.data(), crew);
}

void derive_loss(int loss, double parameter, const Flat<const double>& y,
                 const std::optional<Flat<const double>>& weights, const std::optional<Flat<const uint8_t>>& is_held,
                 const Table<const double>& scores, const Flat<const int64_t>& block_starts,
                 const Table<double>& gradients, const Table<double>& hessians, const Table<double>& losses,
                 size_t threads) {
  const size_t row_count = y.shape(0), score_count = scores.shape(1), blocks = losses.shape(0);
  const bool is_softmax = loss == static_cast<int>(Loss::kSoftmax);
  check(loss >= 0 && loss <= static_cast<int>(Loss::kTweedie) && (is_softmax || score_count == 1), "loss");
  for (const auto* table : {&gradients, &hessians}) {
    check(table->shape(0) == row_count && table->shape(1) == score_count, "derivatives");
  }
  check(scores.shape(0) == row_count && losses.shape(1) == 2 && block_starts.shape(0) == blocks + 1, "scores, blocks");
  check(block_starts.data()[blocks] == static_cast<int64_t>(row_count) && block_starts.data()[0] == 0, "blocks");
  for (size_t b = 0; b < blocks; ++b) check(block_starts.data()[b] <= block_starts.data()[b + 1], "blocks");
  if (is_softmax) {
    for (size_t row = 0; row < row_count; ++row) {
      check(y.data()[row] >= 0 && y.data()[row] < static_cast<double>(score_count), "classes");
    }
  }
  const LossRows rows{static_cast<Loss>(loss),     parameter,     y.data(),  pointer(weights, row_count),
                      pointer(is_held, row_count), scores.data(), row_count, score_count};
  const ReleaseGil released;
  Crew crew(threads);
  derive(rows, block_starts.data(), blocks, gradients.data(), hessians.data(), losses.data(), crew);
}

std::tuple<double, double> largest_integers(uint64_t row_count) {
  const Packing packing = Packing::of(row_count);
  return {packing.most_gradient, packing.most_hessian};
}

void pack_rows(const Table<const double>& gradients, const Table<const double>& hessians,
               const std::optional<Flat<const double>>& weights, const std::optional<Flat<const uint8_t>>& is_out,
               size_t column, double gradient_scale, double hessian_scale, uint64_t seed, uint64_t first_row,
               uint64_t rows_of_all_tasks, const Flat<int64_t>& integers, size_t threads) {
  const size_t row_count = gradients.shape(0), score_count = gradients.shape(1);
  check(hessians.shape(0) == row_count && hessians.shape(1) == score_count && column < score_count, "derivatives");
  check(integers.shape(0) == row_count && row_count <= rows_of_all_tasks, "integers");
  const Packed rows{gradients.data(),
                    hessians.data(),
                    pointer(weights, row_count),
                    pointer(is_out, row_count),
                    row_count,
                    score_count,
                    column,
                    gradient_scale,
                    hessian_scale,
                    seed,
                    first_row};
  const ReleaseGil released;
  Crew crew(threads);
  pack(rows, Packing::of(rows_of_all_tasks), integers.data(), crew);
}

// Calls a function with an array, which is valid until it returns.
SumOverTasks summing_by(const nb::object& function) {
  if (function.is_none()) return {};
  return [&function](int64_t* numbers, size_t count) {
    const TakeGil taken;
    nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> array(numbers, {count}, nb::handle());
    function(nb::cast(array, nb::rv_policy::reference));
  };
}

// Returns how many groups of columns there are; 0 of none.
size_t checked_groups(const std::optional<Flat<const int64_t>>& starts,
                      const std::optional<Flat<const int32_t>>& columns, size_t column_count) {
  if (!starts || !columns) return 0;
  const size_t count = starts->shape(0) - 1;
  check(starts->shape(0) > 1 && starts->data()[0] == 0 &&
            starts->data()[count] == static_cast<int64_t>(columns->shape(0)),
        "groups of columns");
  for (size_t g = 0; g < count; ++g) check(starts->data()[g] <= starts->data()[g + 1], "groups of columns");
  for (size_t i = 0; i < columns->shape(0); ++i) {
    check(columns->data()[i] >= 0 && static_cast<size_t>(columns->data()[i]) < column_count, "columns of groups");
  }
  return count;
}

size_t grow(const Flat<const uint8_t>& binned, const Flat<const double>& values, const Flat<const int64_t>& starts,
            const Flat<const uint8_t>& is_categorical, const Flat<const int64_t>& integers, double gradient_scale,
            double hessian_scale, uint64_t rows_of_all_tasks, size_t most_leaves, size_t most_depth, int64_t least_rows,
            double least_hessian, double least_gain, double l1, double l2, size_t columns_of_node, bool is_extra_random,
            uint64_t seed, const std::optional<Flat<const int8_t>>& monotone,
            const std::optional<Flat<const int64_t>>& group_starts,
            const std::optional<Flat<const int32_t>>& group_columns, const nb::object& sum_over_tasks,
            const Flat<int32_t>& column, const Flat<int32_t>& bin, const Flat<int32_t>& left,
            const Flat<uint8_t>& missing_left, const Table<uint64_t>& categories, const Flat<double>& gain,
            const Flat<int64_t>& count, const Table<double>& bounds, const Table<int64_t>& rows,
            const Flat<uint32_t>& permutation, size_t threads) {
  const size_t row_count = integers.shape(0), column_count = is_categorical.shape(0), room = column.shape(0);
  const Bins bins = checked_bins(values, starts, is_categorical);
  const BinnedRows binned_rows = checked_rows(binned, row_count, column_count);
  check(row_count <= rows_of_all_tasks && permutation.shape(0) == row_count, "rows");
  check(most_leaves >= 2 && room >= 2 * most_leaves - 1 && bin.shape(0) == room && left.shape(0) == room &&
            missing_left.shape(0) == room && categories.shape(0) == room && categories.shape(1) == 4 &&
            gain.shape(0) == room && count.shape(0) == room && bounds.shape(0) == room && bounds.shape(1) == 2 &&
            rows.shape(0) == room && rows.shape(1) == 2,
        "nodes");
  check(least_rows > 0 && columns_of_node > 0, "rules");
  const size_t groups = checked_groups(group_starts, group_columns, column_count);
  const Packing packing = Packing::of(rows_of_all_tasks);
  const TreeRows all{binned_rows, bins, integers.data(), packing, gradient_scale, hessian_scale, rows_of_all_tasks};
  const TreeRules rules{most_leaves,
                        most_depth,
                        least_rows,
                        least_hessian,
                        least_gain,
                        l1,
                        l2,
                        columns_of_node,
                        is_extra_random,
                        seed,
                        pointer(monotone, column_count),
                        groups ? group_starts->data() : nullptr,
                        groups ? group_columns->data() : nullptr,
                        groups};
  const TreeNodes nodes{column.data(), bin.data(),   left.data(),   missing_left.data(), categories.data(),
                        gain.data(),   count.data(), bounds.data(), rows.data()};
  const SumOverTasks sum = summing_by(sum_over_tasks);
  const ReleaseGil released;
  Crew crew(threads);
  return grow_tree(all, rules, sum, nodes, permutation.data(), crew);
}

LeafRows checked_leaves(const Flat<const uint32_t>& permutation, const Table<const int64_t>& places,
                        const Flat<const int64_t>& integers) {
  const size_t row_count = permutation.shape(0);
  check(integers.shape(0) == row_count && places.shape(1) == 2, "leaves");
  for (size_t leaf = 0; leaf < places.shape(0); ++leaf) {
    const int64_t begin = places.data()[2 * leaf], end = places.data()[2 * leaf + 1];
    check(0 <= begin && begin <= end && end <= static_cast<int64_t>(row_count), "places of leaves");
  }
  return {permutation.data(), places.data(), places.shape(0), integers.data()};
}

void sum_of_leaves(const Flat<const uint32_t>& permutation, const Table<const int64_t>& places,
                   const Flat<const int64_t>& integers, const Table<const double>& gradients,
                   const Table<const double>& hessians, size_t column, double gradient_scale, double hessian_scale,
                   const Table<int64_t>& sums, size_t threads) {
  const LeafRows leaves = checked_leaves(permutation, places, integers);
  check(gradients.shape(0) == permutation.shape(0) && hessians.shape(0) == permutation.shape(0) &&
            hessians.shape(1) == gradients.shape(1) && column < gradients.shape(1),
        "derivatives");
  check(sums.shape(0) == leaves.leaf_count && sums.shape(1) == 2, "sums");
  const ReleaseGil released;
  Crew crew(threads);
  sum_leaves(leaves, gradients.data(), hessians.data(), gradients.shape(1), column, gradient_scale, hessian_scale,
             sums.data(), crew);
}

void add_leaf_values(const Flat<const uint32_t>& permutation, const Table<const int64_t>& places,
                     const Flat<const int64_t>& integers, const Flat<const double>& values, const Table<double>& scores,
                     size_t column, size_t threads) {
  const LeafRows leaves = checked_leaves(permutation, places, integers);
  check(values.shape(0) == leaves.leaf_count && scores.shape(0) == permutation.shape(0) && column < scores.shape(1),
        "values");
  const ReleaseGil released;
  Crew crew(threads);
  add_values(leaves, values.data(), scores.data(), scores.shape(1), column, crew);
}

void count_leaf_bytes(const Flat<const uint32_t>& permutation, const Table<const int64_t>& places,
                      const Flat<const int64_t>& integers, const Flat<const double>& y,
                      const Flat<const double>& scores, const std::optional<Flat<const int64_t>>& weights,
                      const Flat<const uint64_t>& prefixes, int shift, const Table<int64_t>& counts, size_t threads) {
  const LeafRows leaves = checked_leaves(permutation, places, integers);
  check(y.shape(0) == permutation.shape(0) && scores.shape(0) == y.shape(0), "residuals");
  check(prefixes.shape(0) == leaves.leaf_count && counts.shape(0) == leaves.leaf_count && counts.shape(1) == 256,
        "counts");
  check(shift >= 0 && shift <= 56, "shift");
  const int64_t* weight = pointer(weights, y.shape(0));
  const ReleaseGil released;
  Crew crew(threads);
  count_bytes(leaves, y.data(), scores.data(), weight, prefixes.data(), shift, counts.data(), crew);
}

Trees checked_trees(const Flat<const int32_t>& column, const Flat<const int32_t>& bin, const Flat<const int32_t>& left,
                    const Flat<const uint8_t>& missing_left, const Table<const uint64_t>& categories,
                    const Table<const double>& values, const Flat<const int64_t>& roots,
                    const Flat<const int32_t>& tree_scores, size_t column_count, size_t score_count) {
  const size_t nodes = column.shape(0);
  check(bin.shape(0) == nodes && left.shape(0) == nodes && missing_left.shape(0) == nodes &&
            categories.shape(0) == nodes && categories.shape(1) == 4 && values.shape(0) == nodes &&
            roots.shape(0) == tree_scores.shape(0) + 1 && nodes <= INT32_MAX,
        "nodes");
  const Trees trees{column.data(),       bin.data(), left.data(),     missing_left.data(), categories.data(),
                    values.data(),       nodes,      values.shape(1), roots.data(),        tree_scores.data(),
                    tree_scores.shape(0)};
  check(are_sound(trees, column_count, score_count), "they are not trees");
  return trees;
}

void predict_scores(const Flat<const int32_t>& column, const Flat<const int32_t>& bin, const Flat<const int32_t>& left,
                    const Flat<const uint8_t>& missing_left, const Table<const uint64_t>& categories,
                    const Table<const double>& values, const Flat<const int64_t>& roots,
                    const Flat<const int32_t>& tree_scores, const Flat<const uint8_t>& binned,
                    const Flat<const double>& bin_values, const Flat<const int64_t>& starts,
                    const Flat<const uint8_t>& is_categorical, const Table<double>& scores, size_t threads) {
  const Bins bins = checked_bins(bin_values, starts, is_categorical);
  const BinnedRows rows = checked_rows(binned, scores.shape(0), is_categorical.shape(0));
  const Trees trees = checked_trees(column, bin, left, missing_left, categories, values, roots, tree_scores,
                                    is_categorical.shape(0), scores.shape(1));
  const ReleaseGil released;
  Crew crew(threads);
  predict(trees, rows, bins, scores.data(), scores.shape(1), crew);
}

void leaves_of_rows(const Flat<const int32_t>& column, const Flat<const int32_t>& bin, const Flat<const int32_t>& left,
                    const Flat<const uint8_t>& missing_left, const Table<const uint64_t>& categories,
                    const Table<const double>& values, const Flat<const int64_t>& roots,
                    const Flat<const int32_t>& tree_scores, const Flat<const uint8_t>& binned,
                    const Flat<const double>& bin_values, const Flat<const int64_t>& starts,
                    const Flat<const uint8_t>& is_categorical, const Table<int32_t>& leaves, size_t threads) {
  const Bins bins = checked_bins(bin_values, starts, is_categorical);
  const BinnedRows rows = checked_rows(binned, leaves.shape(0), is_categorical.shape(0));
  const Trees trees = checked_trees(column, bin, left, missing_left, categories, values, roots, tree_scores,
                                    is_categorical.shape(0), SIZE_MAX);
  check(leaves.shape(1) == trees.tree_count, "leaves");
  const ReleaseGil released;
  Crew crew(threads);
  find_leaves(trees, rows, bins, leaves.data(), crew);
}

void add_contributions(const Flat<const int32_t>& column, const Flat<const int32_t>& bin,
                       const Flat<const int32_t>& left, const Flat<const uint8_t>& missing_left,
                       const Table<const uint64_t>& categories, const Table<const double>& values,
                       const Flat<const int64_t>& roots, const Flat<const int32_t>& tree_scores,
                       const Flat<const int64_t>& counts, const Flat<const uint8_t>& binned,
                       const Flat<const double>& bin_values, const Flat<const int64_t>& starts,
                       const Flat<const uint8_t>& is_categorical, const Table<double>& contributions,
                       size_t score_count, size_t threads) {
  const Bins bins = checked_bins(bin_values, starts, is_categorical);
  const size_t column_count = is_categorical.shape(0);
  const BinnedRows rows = checked_rows(binned, contributions.shape(0), column_count);
  const Trees trees =
      checked_trees(column, bin, left, missing_left, categories, values, roots, tree_scores, column_count, score_count);
  check(contributions.shape(1) == score_count * (column_count + 1), "contributions");
  check(counts.shape(0) == trees.node_count, "counts");
  for (size_t node = 0; node < trees.node_count; ++node) check(counts.data()[node] >= 0, "counts below 0");
  const ReleaseGil released;
  Crew crew(threads);
  add_shap_values(trees, counts.data(), rows, bins, contributions.data(), score_count, crew);
}

void derive_groups(const Flat<const double>& y, const Flat<const double>& scores, const Flat<const int64_t>& starts,
                   size_t truncation, const Flat<double>& gradients, const Flat<double>& hessians,
                   const Flat<double>& losses, size_t threads) {
  const size_t row_count = y.shape(0), group_count = losses.shape(0);
  check(scores.shape(0) == row_count && gradients.shape(0) == row_count && hessians.shape(0) == row_count, "rows");
  check(starts.shape(0) == group_count + 1 && starts.data()[0] == 0 &&
            starts.data()[group_count] == static_cast<int64_t>(row_count) && row_count <= UINT32_MAX,
        "groups");
  for (size_t g = 0; g < group_count; ++g) check(starts.data()[g] < starts.data()[g + 1], "groups");
  for (size_t row = 0; row < row_count; ++row) check(y.data()[row] >= 0 && y.data()[row] <= 31, "relevances");
  const RankedGroups groups{y.data(), scores.data(), starts.data(), group_count, truncation};
  const ReleaseGil released;
  Crew crew(threads);
  derive_ranking(groups, gradients.data(), hessians.data(), losses.data(), crew);
}

// The rows of a forest; raises UsageError unless the arrays match.
size_t checked_columns(const Flat<const uint8_t>& bins, size_t row_count, size_t column_count) {
  check(bins.shape(0) == column_count * row_count && row_count < size_t{1} << 27, "bytes of columns");
  return row_count;
}

void identify(const Flat<const uint8_t>& bins, size_t column_count, const Flat<uint64_t>& identities, size_t threads) {
  const size_t row_count = checked_columns(bins, identities.shape(0), column_count);
  const ReleaseGil released;
  Crew crew(threads);
  identify_rows(bins.data(), row_count, column_count, identities.data(), crew);
}

Draws checked_draws(const Flat<const uint64_t>& identities, const Flat<const uint32_t>& firsts,
                    const Flat<const uint32_t>& repeats, double rate) {
  const size_t row_count = identities.shape(0);
  check(firsts.shape(0) == row_count && repeats.shape(0) == row_count && rate >= 0, "draws");
  return {identities.data(), firsts.data(), repeats.data(), row_count, rate};
}

void draw(const Flat<const uint64_t>& identities, const Flat<const uint32_t>& firsts,
          const Flat<const uint32_t>& repeats, double rate, uint64_t seed, const Flat<uint32_t>& counts) {
  const Draws draws = checked_draws(identities, firsts, repeats, rate);
  check(counts.shape(0) == draws.row_count, "counts");
  const ReleaseGil released;
  count_draws(draws, seed, counts.data());
}

template <class T>
nb::bytes bytes_of(const std::vector<T>& numbers) {
  return nb::bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T));
}

// Returns the arrays of each tree as bytes, in the order of ForestTree.
nb::list grow_trees_of_forest(const Flat<const uint8_t>& bins, const Flat<const double>& values,
                              const Flat<const int64_t>& starts, const Flat<const uint8_t>& is_categorical,
                              const Flat<const uint64_t>& identities, const Flat<const uint32_t>& firsts,
                              const Flat<const uint32_t>& repeats, double rate, const Flat<const int64_t>& weights,
                              const Flat<const double>& y, const std::optional<Flat<const int64_t>>& integers,
                              size_t class_count, int criterion, size_t most_leaves, size_t most_depth,
                              int64_t least_rows, int64_t least_split, double least_weight, double least_decrease,
                              double unit, size_t columns_of_node, bool is_extra_random,
                              const std::optional<Flat<const double>>& lows,
                              const std::optional<Flat<const double>>& highs, const Flat<const uint64_t>& seeds,
                              size_t threads) {
  const Draws draws = checked_draws(identities, firsts, repeats, rate);
  const Bins by = checked_bins(values, starts, is_categorical);
  const size_t row_count = checked_columns(bins, draws.row_count, is_categorical.shape(0));
  check(y.shape(0) == row_count && weights.shape(0) == row_count && row_count > 0, "targets");
  check(criterion >= 0 && criterion <= static_cast<int>(Criterion::kSquared), "criterion");
  check((class_count > 0) != integers.has_value() && least_rows > 0, "targets");
  for (size_t row = 0; class_count > 0 && row < row_count; ++row) {
    check(y.data()[row] >= 0 && y.data()[row] < static_cast<double>(class_count), "classes");
  }
  check(!is_extra_random || (lows && highs), "values of bins");
  const size_t places = is_categorical.shape(0) * kMostBins;
  const ForestRows rows{
      bins.data(),           row_count, is_categorical.shape(0),      by,          draws,
      weights.data(),        y.data(),  pointer(integers, row_count), class_count, pointer(lows, places),
      pointer(highs, places)};
  const ForestRules rules{static_cast<Criterion>(criterion),
                          most_leaves,
                          most_depth,
                          least_rows,
                          least_split,
                          least_weight,
                          least_decrease,
                          unit,
                          columns_of_node,
                          is_extra_random};
  std::vector<ForestTree> trees;
  {
    const ReleaseGil released;
    Crew crew(threads);
    trees = grow_forest(rows, rules, seeds.data(), seeds.shape(0), crew);
  }
  nb::list result;
  for (ForestTree& tree : trees) {
    result.append(nb::make_tuple(bytes_of(tree.column), bytes_of(tree.bin), bytes_of(tree.left),
                                 bytes_of(tree.missing_left), bytes_of(tree.categories), bytes_of(tree.values),
                                 bytes_of(tree.gain), bytes_of(tree.count)));
    tree = {};
  }
  return result;
}

template <class T>
constexpr bool kMayBeNone = false;
template <class T>
constexpr bool kMayBeNone<std::optional<T>> = true;
template <>
inline constexpr bool kMayBeNone<nb::object> = true;

// Results must not go to a copy of an array, so nothing is converted.
template <class T>
auto argument() {
  if constexpr (kMayBeNone<std::remove_cvref_t<T>>) {
    return nb::arg().none().noconvert();
  } else {
    return nb::arg().noconvert();
  }
}

template <class Result, class... Args>
void define(nb::module_& module, const char* name, Result (*function)(Args...)) {
  module.def(name, function, argument<Args>()...);
}

}  // namespace

// Arguments are positional; ronde/ml/trees names them.
void bind_trees(nb::module_& module) {
  define(module, "tree_bin_rows", &bin_table);
  define(module, "tree_derive", &derive_loss);
  module.def("tree_largest_integers", &largest_integers);
  define(module, "tree_pack", &pack_rows);
  define(module, "tree_grow", &grow);
  define(module, "tree_sum_leaves", &sum_of_leaves);
  define(module, "tree_add_values", &add_leaf_values);
  define(module, "tree_count_bytes", &count_leaf_bytes);
  define(module, "tree_derive_groups", &derive_groups);
  define(module, "tree_predict", &predict_scores);
  define(module, "tree_find_leaves", &leaves_of_rows);
  define(module, "tree_add_shap_values", &add_contributions);
  define(module, "forest_identify", &identify);
  define(module, "forest_draw", &draw);
  define(module, "forest_grow", &grow_trees_of_forest);
}

}  // namespace ronde
