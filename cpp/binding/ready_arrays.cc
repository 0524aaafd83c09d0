// Whole collectives in one native call, for arrays that need no preparation: with small arrays the steps in Python take
// several times as long as the communication.
//
// Nothing here raises an error about arguments. Whatever is not as it should be is left to ronde/comm/communicator.py,
// which makes the same calls of the communicator in the same order: one rank may come this way, and another that way.
#include "binding/ready_arrays.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "base/shape_word.h"
#include "binding/array.h"
#include "binding/border.h"

namespace ronde {
namespace {

using Sizes = std::vector<size_t>;

// What a call returns to Python: the caller's `out` if it is done, None if it is done and the result is elsewhere, or a
// list. The list is empty if nothing is done; or it has what the first step of an operation with two steps told.
using Outcome = nb::object;
Outcome done(nb::handle out) { return nb::borrow(out); }
Outcome done_elsewhere() { return nb::none(); }
Outcome nothing() { return nb::list(); }

bool load(Array& array, nb::handle object) {
  return !object.is_none() && array.load(object, false) && array.dtype().has_value();
}
bool load_result(Array& array, nb::handle object) { return array.load_result(object) && array.dtype().has_value(); }

// Rows: the entries of the first axis. An array without axes is one row.
size_t row_count(const Array& array) { return array.axes().empty() ? 1 : static_cast<size_t>(array.axes()[0]); }
std::span<const int64_t> row_shape(const Array& array) {
  return array.axes().subspan(std::min<size_t>(array.axes().size(), 1));
}
size_t items_of(std::span<const int64_t> shape) {
  size_t items = 1;
  for (const int64_t length : shape) items *= static_cast<size_t>(length);
  return items;
}
size_t row_items(const Array& array) { return items_of(row_shape(array)); }

// `units` for each of so many rows.
Sizes times(std::span<const uint64_t> rows, size_t units) {
  Sizes sizes;
  for (const uint64_t count : rows) sizes.push_back(count * units);
  return sizes;
}

// The first ranks get one row more than the others if the rows cannot be split evenly.
std::vector<uint64_t> even_split(size_t rows, size_t size) {
  std::vector<uint64_t> counts;
  for (size_t rank = 0; rank < size; ++rank) counts.push_back(rows / size + (rank < rows % size ? 1 : 0));
  return counts;
}

// Whether `out` has rows of this type and shape.
bool has_rows_like(const Array& out, DType dtype, std::span<const int64_t> shape) {
  return out.dtype() == dtype && !out.axes().empty() && std::ranges::equal(row_shape(out), shape);
}

// Whether these numbers, which other ranks have told, add up to `total`. No sum wraps.
bool add_up_to(std::span<const uint64_t> numbers, uint64_t total) {
  for (const uint64_t number : numbers) {
    if (number > total) return false;
    total -= number;
  }
  return total == 0;
}

// The input and the result of an operation that keeps the shape; `out` may be `x`.
struct InOut {
  Array in, separate;
  bool is_in_place = false;

  bool load(nb::handle x, nb::handle out) {
    is_in_place = out.is(x);
    if (is_in_place) return load_result(in, x);
    return ronde::load(in, x) && load_result(separate, out) && separate.dtype() == in.dtype() &&
           separate.has_shape_of(in) && !overlap(in, separate);
  }
  void* result() const { return is_in_place ? in.data() : separate.data(); }
};

// A rank of the communicator, or kNoRank if `object` is none.
constexpr int kNoRank = -1;

int rank_of(const Communicator& communicator, nb::handle object) {
  int rank = kNoRank;
  return nb::try_cast(object, rank) && rank >= 0 && rank < communicator.size() ? rank : kNoRank;
}

Outcome reduce_ready(Communicator& communicator, nb::handle x, nb::handle out, int op, nb::handle root_object) {
  const int root = rank_of(communicator, root_object);
  InOut arrays;
  const bool is_root = communicator.rank() == root;
  if (root == kNoRank || !(is_root ? arrays.load(x, out) : load(arrays.in, x))) return nothing();
  const Array& in = arrays.in;
  without_gil(communicator, [&] {
    communicator.reduce(in.data(), is_root ? arrays.result() : nullptr, in.count(), *in.dtype(),
                        static_cast<ReduceOp>(op), root, word_of_shape(in.axes()));
  });
  return is_root ? done(out) : done_elsewhere();
}

bool broadcast_ready(Communicator& communicator, nb::handle x, nb::handle out, nb::handle root_object) {
  const int root = rank_of(communicator, root_object);
  InOut arrays;
  if (root == kNoRank || !arrays.load(x, out)) return false;
  const Array& in = arrays.in;
  without_gil(communicator, [&] {
    const bool copies = communicator.rank() == root && !arrays.is_in_place && in.bytes() > 0;
    if (copies) std::memcpy(arrays.result(), in.data(), in.bytes());
    communicator.broadcast(arrays.result(), in.count(), *in.dtype(), root, Kind::kBroadcast, word_of_shape(in.axes()));
  });
  return true;
}

bool reduce_scatter_ready(Communicator& communicator, nb::handle x, nb::handle out, int op) {
  Array in, result;
  if (!load(in, x) || in.axes().empty() || !load_result(result, out) || overlap(in, result)) return false;
  const std::vector<uint64_t> rows = even_split(row_count(in), static_cast<size_t>(communicator.size()));
  if (!has_rows_like(result, *in.dtype(), row_shape(in))) return false;
  if (row_count(result) != rows[static_cast<size_t>(communicator.rank())]) return false;
  without_gil(communicator, [&] {
    communicator.reduce_scatter(in.data(), result.data(), times(rows, row_items(in)), *in.dtype(),
                                static_cast<ReduceOp>(op), 0, word_of_shape(in.axes()));
  });
  return true;
}

// A gather, or an all-gather if the root is kNoRoot. The first step tells the ranks' rows.
constexpr int kNoRoot = -1;
Outcome gather_to(Communicator& communicator, nb::handle x, nb::handle out, int root) {
  Array in, result;
  if (!load(in, x)) return nothing();
  const bool gets_result = root == kNoRoot || root == communicator.rank();
  const bool has_out = gets_result && load_result(result, out) && !overlap(in, result) &&
                       has_rows_like(result, *in.dtype(), row_shape(in));
  std::vector<uint64_t> rows(static_cast<size_t>(communicator.size()));
  bool is_done = false;
  without_gil(communicator, [&] {
    communicator.begin_gather(in.data(), row_count(in), row_items(in), *in.dtype(), root, word_of_shape(row_shape(in)),
                              rows);
    if (gets_result && !(has_out && add_up_to(rows, row_count(result)))) return;
    const Sizes sizes = times(rows, row_items(in) * size_of(*in.dtype()));
    communicator.end_gather(in.data(), result.data(), sizes, *in.dtype(), root);
    is_done = true;
  });
  if (!is_done) return nb::cast(rows);
  return gets_result ? done(out) : done_elsewhere();
}

Outcome allgather_ready(Communicator& communicator, nb::handle x, nb::handle out) {
  return gather_to(communicator, x, out, kNoRoot);
}

Outcome gather_ready(Communicator& communicator, nb::handle x, nb::handle out, nb::handle root_object) {
  const int root = rank_of(communicator, root_object);
  return root == kNoRank ? nothing() : gather_to(communicator, x, out, root);
}

// All-to-all with equally many rows for each rank. The first step tells the rows from each rank.
Outcome alltoall_ready(Communicator& communicator, nb::handle x, nb::handle out) {
  Array in, result;
  const auto size = static_cast<size_t>(communicator.size());
  if (!load(in, x) || in.axes().empty() || row_count(in) % size != 0) return nothing();
  // Whether an `out` is memory other than `x` is checked before the first step.
  if (!out.is_none() && (!load_result(result, out) || overlap(in, result))) return nothing();
  const bool has_out = has_rows_like(result, *in.dtype(), row_shape(in));
  const std::vector<uint64_t> sending(size, row_count(in) / size);
  std::vector<uint64_t> rows(size);
  bool is_done = false;
  without_gil(communicator, [&] {
    const uint64_t shape = word_of_shape(row_shape(in));
    communicator.begin_alltoall(in.data(), sending, row_items(in), *in.dtype(), shape, rows);
    if (!has_out || !add_up_to(rows, row_count(result))) return;
    const size_t row_bytes = row_items(in) * size_of(*in.dtype());
    communicator.end_alltoall(in.data(), times(sending, row_bytes), result.data(), times(rows, row_bytes), *in.dtype(),
                              shape);
    is_done = true;
  });
  return is_done ? done(out) : nb::cast(rows);
}

// Only the root passes `x`. The first step tells the type and the lengths of the axes of the root's array.
Outcome scatter_ready(Communicator& communicator, nb::handle x, nb::handle out, nb::handle root_object) {
  const int root = rank_of(communicator, root_object);
  Array in, result;
  const auto size = static_cast<size_t>(communicator.size());
  const bool is_root = communicator.rank() == root;
  if (root == kNoRank) return nothing();
  std::vector<int64_t> words;
  Sizes sizes;
  if (is_root) {
    if (!load(in, x) || in.axes().empty() || in.axes().size() >= Communicator::kScatterWords) return nothing();
    words.push_back(static_cast<int64_t>(*in.dtype()));
    words.insert(words.end(), in.axes().begin(), in.axes().end());
    sizes = times(even_split(row_count(in), size), row_items(in) * size_of(*in.dtype()));
  }
  const bool has_out = load_result(result, out) && !(is_root && overlap(in, result));
  bool is_done = false;
  without_gil(communicator, [&] {
    communicator.begin_scatter(words, in.data(), sizes, root);
    if (!has_out) return;
    const auto shape = std::span(words).subspan(2);
    const auto dtype = static_cast<DType>(words[0]);
    const auto rows = even_split(static_cast<size_t>(words[1]), size);
    if (!has_rows_like(result, dtype, shape)) return;
    if (row_count(result) != rows[static_cast<size_t>(communicator.rank())]) return;
    communicator.end_scatter(in.data(), result.data(), times(rows, items_of(shape) * size_of(dtype)), dtype, root);
    is_done = true;
  });
  return is_done ? done(out) : nb::cast(words);
}

}  // namespace

void bind_ready_arrays(nb::class_<Communicator>& communicator) {
  using namespace nb::literals;
  communicator.def("reduce", &reduce_ready, "x"_a.none(), "out"_a.none(), "op"_a, "root"_a.none())
      .def("broadcast", &broadcast_ready, "x"_a.none(), "out"_a.none(), "root"_a.none())
      .def("reduce_scatter", &reduce_scatter_ready, "x"_a.none(), "out"_a.none(), "op"_a)
      .def("allgather", &allgather_ready, "x"_a.none(), "out"_a.none())
      .def("gather", &gather_ready, "x"_a.none(), "out"_a.none(), "root"_a.none())
      .def("scatter", &scatter_ready, "x"_a.none(), "out"_a.none(), "root"_a.none())
      .def("alltoall", &alltoall_ready, "x"_a.none(), "out"_a.none());
}

}  // namespace ronde
