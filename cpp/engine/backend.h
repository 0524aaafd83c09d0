// Backends move the bytes of a collective: the communicator, or another library (MPI, Gloo, ...) behind the same few
// operations.
//
// A tensor's kind, element type, reduction and device alone determine its backend, by a table that all ranks agree on
// when the engine starts (ronde/engine/chosen_backends.py). So all ranks choose the same backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "communicator/communicator.h"
#include "engine/signature.h"

namespace ronde {

// Counts are elements, sizes are bytes; spans have one entry per rank. All ranks make the same calls in the same order.
// One thread calls at a time, not always the same one. An average divides by `divisor`, the number of ranks that
// contribute. All functions throw the communicator's errors.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual void allreduce(const void* in, void* out, size_t count, DType dtype, ReduceOp op, int divisor) = 0;
  virtual void reduce_scatter(const void* in, void* out, std::span<const size_t> counts, DType dtype, ReduceOp op,
                              int divisor) = 0;
  virtual void allgather(const void* in, void* out, std::span<const size_t> sizes, DType dtype) = 0;
  virtual void broadcast(void* data, size_t count, DType dtype, int root) = 0;
  virtual void alltoall(const void* in, std::span<const size_t> in_sizes, void* out, std::span<const size_t> out_sizes,
                        DType dtype) = 0;
  virtual void barrier() = 0;
};

class NativeBackend final : public Backend {
 public:
  explicit NativeBackend(Communicator& communicator) : communicator_(communicator) {}
  void allreduce(const void* in, void* out, size_t count, DType dtype, ReduceOp op, int divisor) override {
    communicator_.allreduce(in, out, count, dtype, op, divisor);
  }
  void reduce_scatter(const void* in, void* out, std::span<const size_t> counts, DType dtype, ReduceOp op,
                      int divisor) override {
    communicator_.reduce_scatter(in, out, counts, dtype, op, divisor);
  }
  void allgather(const void* in, void* out, std::span<const size_t> sizes, DType dtype) override {
    communicator_.allgather(in, out, sizes, dtype);
  }
  void broadcast(void* data, size_t count, DType dtype, int root) override {
    communicator_.broadcast(data, count, dtype, root);
  }
  void alltoall(const void* in, std::span<const size_t> in_sizes, void* out, std::span<const size_t> out_sizes,
                DType dtype) override {
    communicator_.alltoall(in, in_sizes, out, out_sizes, dtype);
  }
  void barrier() override { communicator_.barrier(); }

 private:
  Communicator& communicator_;
};

// The available backends, and the table that assigns tensors to them.
class Backends {
 public:
  explicit Backends(Communicator& communicator) : native_(communicator) {}

  // A tensor's place in the table. The entry there is 0 for the native backend, 1 for the first of the others.
  static constexpr size_t kTableSize = 2 << 12;
  static size_t place_of(Kind kind, DType dtype, ReduceOp op, bool on_device) {
    return (on_device ? 1 << 12 : 0) | static_cast<size_t>(kind) << 8 | static_cast<size_t>(dtype) << 4 |
           static_cast<size_t>(op);
  }

  // Call it before any collective runs.
  void use(std::vector<std::unique_ptr<Backend>> others, std::vector<uint8_t> table) {
    others_ = std::move(others);
    table_ = std::move(table);
  }

  Backend& of(const Signature& signature) {
    const uint8_t number = number_of(signature);
    return number == 0 ? native_ : *others_[number - 1];
  }
  bool is_native(const Signature& signature) const { return number_of(signature) == 0; }

 private:
  uint8_t number_of(const Signature& signature) const {
    if (table_.empty()) return 0;
    return table_[place_of(signature.kind, signature.dtype, signature.op, signature.is_on_device())];
  }

  NativeBackend native_;
  std::vector<std::unique_ptr<Backend>> others_;
  std::vector<uint8_t> table_;  // empty: the native backend runs everything
};

}  // namespace ronde
