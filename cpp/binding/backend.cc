// Calls a backend that is written in Python. The engine calls without the interpreter's lock, so every call takes the
// lock. It passes memory as arrays of bytes, and turns an exception into the communicator's failure on all ranks.
#include "binding/backend.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "binding/border.h"

namespace ronde {
namespace {

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

// An array of the memory itself, valid during a call.
nb::object bytes_at(const void* data, size_t size) {
  static uint8_t nothing;
  void* const place = size == 0 ? &nothing : const_cast<void*>(data);
  return nb::cast(Bytes(place, {size}), nb::rv_policy::reference);
}

size_t sum(std::span<const size_t> values) { return std::accumulate(values.begin(), values.end(), size_t{0}); }

std::vector<size_t> list(std::span<const size_t> values) { return {values.begin(), values.end()}; }

// Throws the C++ error for an exception of a backend. Call it with the interpreter's lock.
[[noreturn]] void fail_as(nb::python_error& error) {
  if (!error.matches(PyExc_Exception)) {  // raised by a signal handler, usually for Ctrl-C
    error.restore();
    throw Interrupted("interrupted by a signal");
  }
  const std::string type = nb::cast<std::string>(error.type().attr("__name__"));
  const std::string text = nb::cast<std::string>(nb::str(error.value()));
  if (error.matches(PyExc_TimeoutError)) throw Failure(FailureKind::kTimeout, -1, text);
  throw std::runtime_error(type + ": " + text);
}

class PythonBackend final : public Backend {
 public:
  PythonBackend(Communicator& communicator, nb::object carrier)
      : communicator_(communicator), carrier_(std::move(carrier)) {}

  ~PythonBackend() override {
    const TakeGil taken;
    carrier_.reset();
  }

  void allreduce(const void* in, void* out, size_t count, DType dtype, ReduceOp op, int divisor) override {
    const size_t bytes = count * size_of(dtype);
    call({.count = count, .kind = Kind::kAllreduce, .dtype = dtype, .op = op}, "allreduce", [&](auto&& invoke) {
      const nb::object source = bytes_at(in, bytes);
      invoke(source, in == out ? source : bytes_at(out, bytes), static_cast<int>(dtype), static_cast<int>(op), divisor);
    });
  }

  void reduce_scatter(const void* in, void* out, std::span<const size_t> counts, DType dtype, ReduceOp op,
                      int divisor) override {
    const size_t total = sum(counts), own = counts[static_cast<size_t>(communicator_.rank())];
    call({.count = total, .kind = Kind::kReduceScatter, .dtype = dtype, .op = op}, "reducescatter", [&](auto&& invoke) {
      invoke(bytes_at(in, total * size_of(dtype)), bytes_at(out, own * size_of(dtype)), list(counts),
             static_cast<int>(dtype), static_cast<int>(op), divisor);
    });
  }

  void allgather(const void* in, void* out, std::span<const size_t> sizes, DType dtype) override {
    call({.kind = Kind::kAllgather, .dtype = dtype}, "allgather", [&](auto&& invoke) {
      invoke(bytes_at(in, sizes[static_cast<size_t>(communicator_.rank())]), bytes_at(out, sum(sizes)), list(sizes));
    });
  }

  void broadcast(void* data, size_t count, DType dtype, int root) override {
    call({.count = count, .root = root, .kind = Kind::kBroadcast, .dtype = dtype}, "broadcast",
         [&](auto&& invoke) { invoke(bytes_at(data, count * size_of(dtype)), root); });
  }

  void alltoall(const void* in, std::span<const size_t> in_sizes, void* out, std::span<const size_t> out_sizes,
                DType dtype) override {
    call({.kind = Kind::kAlltoall, .dtype = dtype}, "alltoall", [&](auto&& invoke) {
      invoke(bytes_at(in, sum(in_sizes)), list(in_sizes), bytes_at(out, sum(out_sizes)), list(out_sizes));
    });
  }

  void barrier() override {
    call({.kind = Kind::kBarrier}, "barrier", [&](auto&& invoke) { invoke(); });
  }

 private:
  template <class Body>
  void call(const Call& call, const char* method, Body&& body) {
    communicator_.delegate(call, [&] {
      const TakeGil taken;
      try {
        body([&](auto&&... arguments) {
          sleeping_at_exit([&] { carrier_.attr(method)(std::forward<decltype(arguments)>(arguments)...); });
        });
      } catch (nb::python_error& error) {
        fail_as(error);
      }
    });
  }

  Communicator& communicator_;
  nb::object carrier_;
};

}  // namespace

std::unique_ptr<Backend> make_python_backend(Communicator& communicator, nb::object carrier) {
  return std::make_unique<PythonBackend>(communicator, std::move(carrier));
}

}  // namespace ronde
