// The Python bindings of the communicator: arrays in, calls without the GIL, errors out. Only bind* include Python.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "algorithms/select.h"
#include "base/shape_word.h"
#include "binding/array.h"
#include "binding/border.h"
#include "binding/connections.h"
#include "binding/ready_arrays.h"
#include "communicator/communicator.h"
#include "waiting/call_terms.h"

namespace ronde {
namespace {

// --- Signals --------------------------------------------------------------------------------------------------------

// Called in the middle of a wait, without the GIL. A thread that has run no Python runs no signal handlers, and must
// not wait for the GIL: the interpreter may be ending.
bool signal_handlers_raised() {
  if (PyGILState_GetThisThreadState() == nullptr) return false;
  const TakeGil taken;
  const WithCallTerms none(0);  // those of the interrupted call are not for what a handler calls
  return PyErr_CheckSignals() != 0;
}

// --- Calls ----------------------------------------------------------------------------------------------------------

using Sizes = std::vector<size_t>;
using Shape = std::vector<int64_t>;

// Loads an array that arrays.py has prepared: it is contiguous, and its element type is a separate argument.
void load(Array& array, nb::handle object, bool writable) {
  if (!object.is_none() && !array.load(object, writable)) {
    raise("UsageError", writable ? "cannot write into this array" : "cannot read this array");
  }
}

void check_output(const Array& in, const Array& out) {
  if (out.dtype() != in.dtype()) {
    raise("UsageError",
          std::string("out holds ") + name_of(*out.dtype()) + " values, the input " + name_of(*in.dtype()));
  }
  if (!out.has_shape_of(in)) {
    raise("UsageError", "out has shape " + out.shape() + ", the result has shape " + in.shape());
  }
  if (in.data() != out.data() && overlap(in, out)) {
    raise("UsageError", "out overlaps the input; it may be the input itself or other memory");
  }
}

// The fast path for arrays that need no preparation. Returns false if arrays.py must prepare them. `is_new`: `out` was
// created to match `x`.
bool allreduce(Communicator& communicator, nb::handle x, nb::handle out, int op, bool is_new) {
  const bool in_place = out.is(x);
  Array in, result;
  if (!(in_place ? in.load_result(x) : in.load(x, false)) || !in.dtype()) return false;
  if (is_new) {
    if (!result.load_memory(out)) return false;
  } else if (!in_place) {
    if (!result.load_result(out) || !result.dtype()) return false;
    check_output(in, result);
  }
  void* destination = in_place ? in.data() : result.data();
  without_gil(communicator, [&] {
    communicator.allreduce(in.data(), destination, in.count(), *in.dtype(), static_cast<ReduceOp>(op), 0,
                           word_of_shape(in.axes()));
  });
  return true;
}

void allreduce_as(Communicator& communicator, nb::handle x, nb::handle out, int dtype, int op, const Shape& shape) {
  Array in, result;
  load(in, x, false);
  load(result, out, true);
  const auto type = static_cast<DType>(dtype);
  without_gil(communicator, [&] {
    communicator.allreduce(in.data(), result.data(), in.bytes() / size_of(type), type, static_cast<ReduceOp>(op), 0,
                           word_of_shape(shape));
  });
}

void check_adasum(const Communicator& communicator, int dtype) {
  try {
    communicator.check_adasum(static_cast<DType>(dtype));
  } catch (const UsageError& error) {
    raise("UsageError", error.what());
  }
}

void reduce_as(Communicator& communicator, nb::handle x, nb::handle out, int dtype, int op, int root,
               const Shape& shape) {
  Array in, result;
  load(in, x, false);
  load(result, out, true);
  const auto type = static_cast<DType>(dtype);
  without_gil(communicator, [&] {
    communicator.reduce(in.data(), result.data(), in.bytes() / size_of(type), type, static_cast<ReduceOp>(op), root,
                        word_of_shape(shape));
  });
}

void reduce_scatter_as(Communicator& communicator, nb::handle x, nb::handle out, const Sizes& counts, int dtype, int op,
                       const Shape& shape) {
  Array in, result;
  load(in, x, false);
  load(result, out, true);
  without_gil(communicator, [&] {
    communicator.reduce_scatter(in.data(), result.data(), counts, static_cast<DType>(dtype), static_cast<ReduceOp>(op),
                                0, word_of_shape(shape));
  });
}

std::vector<uint64_t> begin_gather_as(Communicator& communicator, nb::handle x, uint64_t rows, uint64_t items,
                                      int dtype, int root, const Shape& row_shape) {
  Array in;
  load(in, x, false);
  std::vector<uint64_t> rows_of_ranks(static_cast<size_t>(communicator.size()));
  without_gil(communicator, [&] {
    communicator.begin_gather(in.data(), rows, items, static_cast<DType>(dtype), root, word_of_shape(row_shape),
                              rows_of_ranks);
  });
  return rows_of_ranks;
}

void end_gather_as(Communicator& communicator, nb::handle x, nb::handle out, const Sizes& sizes, int dtype, int root) {
  Array in, result;
  load(in, x, false);
  load(result, out, true);
  without_gil(communicator,
              [&] { communicator.end_gather(in.data(), result.data(), sizes, static_cast<DType>(dtype), root); });
}

void broadcast_as(Communicator& communicator, nb::handle x, int dtype, int root, const Shape& shape, bool sealed) {
  Array data;
  load(data, x, communicator.rank() != root);
  const auto type = static_cast<DType>(dtype);
  without_gil(communicator, [&] {
    communicator.broadcast(data.data(), data.bytes() / size_of(type), type, root, Kind::kBroadcast,
                           word_of_shape(shape), sealed);
  });
}

std::vector<int64_t> begin_scatter_as(Communicator& communicator, nb::handle x, std::vector<int64_t> words,
                                      const Sizes& sizes, int root) {
  Array in;
  load(in, x, false);
  without_gil(communicator, [&] { communicator.begin_scatter(words, in.data(), sizes, root); });
  return words;
}

void end_scatter_as(Communicator& communicator, nb::handle x, nb::handle out, const Sizes& sizes, int dtype, int root) {
  Array in, result;
  load(in, x, false);
  load(result, out, true);
  without_gil(communicator,
              [&] { communicator.end_scatter(in.data(), result.data(), sizes, static_cast<DType>(dtype), root); });
}

std::vector<uint64_t> begin_alltoall_as(Communicator& communicator, nb::handle x, const std::vector<uint64_t>& rows,
                                        uint64_t items, int dtype, const Shape& row_shape) {
  Array in;
  load(in, x, false);
  std::vector<uint64_t> arriving(rows.size());
  without_gil(communicator, [&] {
    communicator.begin_alltoall(in.data(), rows, items, static_cast<DType>(dtype), word_of_shape(row_shape), arriving);
  });
  return arriving;
}

void end_alltoall_as(Communicator& communicator, nb::handle x, const Sizes& in_sizes, nb::handle out,
                     const Sizes& out_sizes, int dtype, const Shape& row_shape) {
  Array in, result;
  load(in, x, false);
  load(result, out, true);
  without_gil(communicator, [&] {
    communicator.end_alltoall(in.data(), in_sizes, result.data(), out_sizes, static_cast<DType>(dtype),
                              word_of_shape(row_shape));
  });
}

void alltoall_as(Communicator& communicator, nb::handle x, const Sizes& in_sizes, nb::handle out,
                 const Sizes& out_sizes, int dtype, const Shape& row_shape, bool sealed) {
  Array in, result;
  load(in, x, false);
  load(result, out, true);
  without_gil(communicator, [&] {
    communicator.alltoall(in.data(), in_sizes, result.data(), out_sizes, static_cast<DType>(dtype),
                          word_of_shape(row_shape), sealed);
  });
}

void send_as(Communicator& communicator, nb::handle x, int dtype, int dest, int tag, bool sealed) {
  Array data;
  load(data, x, false);
  without_gil(communicator,
              [&] { communicator.send(data.data(), data.bytes(), static_cast<DType>(dtype), dest, tag, sealed); });
}

void recv_as(Communicator& communicator, nb::handle x, int dtype, int source, int tag, bool sealed) {
  Array data;
  load(data, x, true);
  without_gil(communicator,
              [&] { communicator.recv(data.data(), data.bytes(), static_cast<DType>(dtype), source, tag, sealed); });
}

std::vector<uint64_t> exchange(Communicator& communicator, int kind, int dtype, int root, uint64_t items,
                               uint64_t value, const Shape& row_shape) {
  std::vector<uint64_t> values(static_cast<size_t>(communicator.size()));
  without_gil(communicator, [&] {
    communicator.exchange(static_cast<Kind>(kind), static_cast<DType>(dtype), root, items, value, values,
                          word_of_shape(row_shape));
  });
  return values;
}

std::optional<int> receive_descriptor(Communicator& communicator, int rank, int64_t timeout_ns) {
  std::optional<int> descriptor;
  without_gil(communicator, [&] { descriptor = communicator.watch().receive_descriptor(rank, timeout_ns); });
  return descriptor;
}

// This rank's part of a new symmetric segment, as bytes. The array keeps only the segment alive.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> map_symmetric(Communicator& communicator, int fd, size_t part_bytes) {
  auto mapping = std::make_shared<Mapping>(fd, part_bytes * static_cast<size_t>(communicator.local_size()));
  struct Owner {
    std::shared_ptr<SymmetricSegments> segments;
    uint32_t number;
  };
  const uint32_t number = communicator.symmetric()->add(std::move(mapping), part_bytes, communicator.local_rank());
  auto owner = std::make_unique<Owner>(Owner{communicator.symmetric(), number});
  std::byte* data = owner->segments->own_part(number);
  const nb::capsule capsule(owner.release(), [](void* pointer) noexcept {
    if (static_cast<Owner*>(pointer)->segments->is_inherited()) return;
    const std::unique_ptr<Owner> owner(static_cast<Owner*>(pointer));
    owner->segments->drop(owner->number);
  });
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(reinterpret_cast<uint8_t*>(data), {part_bytes}, capsule);
}

// Fails the communicator because `rank` has sent something malformed, and raises the failure.
void distrust(Communicator& communicator, int rank, const std::string& what) {
  communicator.watch().distrust(ProtocolError(rank, what));
  raise_failure(communicator, communicator.failure().value());
}

std::unique_ptr<Communicator> connect(int rank, std::vector<std::string> hosts, std::vector<int> host_of, int cores,
                                      int segment, JoinedWatch& watch, const std::map<int, std::vector<Wire>>& data,
                                      int allreduce_algorithm, const std::vector<std::optional<size_t>>& switch_over,
                                      size_t staging_bytes, int64_t timeout_ns, int spin_us, bool adasum_hierarchical,
                                      bool hierarchical_allgather, bool seals_payload, Communicator* twin) {
  Wiring wiring;  // first takes all descriptors, which closes them if anything fails
  Descriptor memory(segment);
  for (const auto& [peer, streams] : data) {
    for (const Wire& wire : streams) wiring.data[peer].emplace_back(Descriptor(std::get<int>(wire)));
  }
  for (const auto& [peer, streams] : data) {
    for (size_t i = 0; i < streams.size(); ++i) set_keys(wiring.data.at(peer)[i], streams[i]);
  }
  const auto local_size = static_cast<int>(std::count(host_of.begin(), host_of.end(), host_of.at(rank)));
  wiring.segment = std::make_shared<Mapping>(memory.release(), HostSegment::bytes(local_size, staging_bytes));
  wiring.rank = rank;
  wiring.hosts = std::move(hosts);
  wiring.host_of = std::move(host_of);
  wiring.cores = cores;
  wiring.watch = watch.take_watch();
  if (twin != nullptr) wiring.symmetric = twin->symmetric();
  const SwitchOver usual;
  const SwitchOver over{switch_over.at(0).value_or(usual.hierarchical_bytes),
                        switch_over.at(1).value_or(usual.doubling_bytes), switch_over.at(2).value_or(usual.ring_bytes)};
  const Options options{static_cast<Algorithm>(allreduce_algorithm),
                        over,
                        staging_bytes,
                        timeout_ns,
                        spin_us,
                        adasum_hierarchical,
                        hierarchical_allgather,
                        seals_payload};
  return std::make_unique<Communicator>(std::move(wiring), options);
}

}  // namespace
}  // namespace ronde

NB_MODULE(_native, module) {
  using namespace nb::literals;
  using ronde::Communicator;
  ronde::Waiter::set_interrupt_check(&ronde::signal_handlers_raised);
  nb::set_leak_warnings(false);  // a communicator may live until the interpreter ends

  module.def("host_segment_bytes", &ronde::HostSegment::bytes, "local_size"_a, "staging_bytes"_a);
  module.def("connect", &ronde::connect, nb::kw_only(), "rank"_a, "hosts"_a, "host_of"_a, "cores"_a, "segment"_a,
             "watch"_a, "data"_a, "allreduce_algorithm"_a, "switch_over"_a, "staging_bytes"_a, "timeout_ns"_a,
             "spin_us"_a, "adasum_hierarchical"_a, "hierarchical_allgather"_a, "seals_payload"_a, "twin"_a.none());

  nb::class_<Communicator> communicator(module, "Communicator");
  communicator.def("allreduce", &ronde::allreduce)
      .def("allreduce_as", &ronde::allreduce_as, "x"_a.none(), "out"_a.none(), "dtype"_a, "op"_a, "shape"_a)
      .def("check_adasum", &ronde::check_adasum)
      .def("reduce_as", &ronde::reduce_as, "x"_a, "out"_a.none(), "dtype"_a, "op"_a, "root"_a, "shape"_a)
      .def("reduce_scatter_as", &ronde::reduce_scatter_as)
      .def("begin_gather_as", &ronde::begin_gather_as, "x"_a, "rows"_a, "items"_a, "dtype"_a, "root"_a, "row_shape"_a)
      .def("end_gather_as", &ronde::end_gather_as, "x"_a, "out"_a.none(), "sizes"_a, "dtype"_a, "root"_a)
      .def("broadcast_as", &ronde::broadcast_as, "x"_a, "dtype"_a, "root"_a, "shape"_a, "sealed"_a = false)
      .def("begin_scatter_as", &ronde::begin_scatter_as, "x"_a.none(), "words"_a, "sizes"_a, "root"_a)
      .def("end_scatter_as", &ronde::end_scatter_as, "x"_a.none(), "out"_a, "sizes"_a, "dtype"_a, "root"_a)
      .def("begin_alltoall_as", &ronde::begin_alltoall_as, "x"_a, "rows"_a, "items"_a, "dtype"_a, "row_shape"_a)
      .def("end_alltoall_as", &ronde::end_alltoall_as, "x"_a, "in_sizes"_a, "out"_a, "out_sizes"_a, "dtype"_a,
           "row_shape"_a)
      .def("alltoall_as", &ronde::alltoall_as, "x"_a, "in_sizes"_a, "out"_a, "out_sizes"_a, "dtype"_a, "row_shape"_a,
           "sealed"_a = false)
      .def("send_as", &ronde::send_as, "x"_a, "dtype"_a, "dest"_a, "tag"_a, "sealed"_a = false)
      .def("recv_as", &ronde::recv_as, "x"_a, "dtype"_a, "source"_a, "tag"_a, "sealed"_a = false)
      .def("exchange", &ronde::exchange)
      .def("barrier", [](Communicator& self) { ronde::without_gil(self, [&] { self.barrier(); }); })
      .def("send_descriptor", [](Communicator& self, int rank, int fd) { self.watch().send_descriptor(rank, fd); })
      .def("receive_descriptor", &ronde::receive_descriptor)
      .def("map_symmetric", &ronde::map_symmetric)
      .def("abort", [](Communicator& self, const std::string& reason) { self.abort(reason); })
      .def("distrust", &ronde::distrust)
      .def("shutdown", [](Communicator& self) { ronde::without_gil(self, [&] { self.shutdown(); }); })
      .def("abandon", &ronde::abandon_for_good<Communicator>)
      .def("is_crowded", &Communicator::is_crowded)
      .def("has_failed", &Communicator::has_failed);
  // For a test: the algorithm of an all-reduce of float32 values by the default settings.
  module.def(
      "select_allreduce",
      [](size_t bytes, int size, int hosts) {
        return static_cast<int>(ronde::select_allreduce(ronde::Algorithm::kAuto, {}, bytes, ronde::DType::kFloat32,
                                                        ronde::ReduceOp::kSum, size, hosts));
      },
      "bytes"_a, "size"_a, "hosts"_a);
  ronde::bind_ready_arrays(communicator);
  ronde::bind_call_queue(module);
  ronde::bind_centers(module);
  ronde::bind_connections(module);
  ronde::bind_coordinate_descent(module);
  ronde::bind_store(module);
  ronde::bind_store_server(module);
  ronde::bind_store_session(module);
  ronde::bind_timeline(module);
  ronde::bind_topics(module);
  ronde::bind_trees(module);
  ronde::bind_engine(module);
  ronde::bind_mailbox(module);
  ronde::bind_words(module);
}
