// Who moves the bytes of a collective: the communicator itself, or another library (MPI, Gloo, ...) behind the same few
// operations.
//
// Which one runs a tensor follows from its kind, element type, reduction and device alone, by a table that all ranks
// have agreed on when the engine began (ronde/engine/carriers.py). So it is the same on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "communicator.h"
#include "engine/signature.h"

namespace ronde {

// Counts are elements, sizes are bytes; spans have one entry per rank. All ranks make the same calls in the same order,
// one thread at a time, which need not be the same one every time. An average divides by `divisor`, the ranks that
// really contribute. All throw what the communicator throws.
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

// The backends that there are, and which one carries what.
class Backends {
 public:
  explicit Backends(Communicator& communicator) : native_(communicator) {}

  // Where the table says who carries a tensor: 0 is the native backend, 1 the first of the others.
  static constexpr size_t kTableSize = 2 << 12;
  static size_t place_of(Kind kind, DType dtype, ReduceOp op, bool on_device) {
    return (on_device ? 1 << 12 : 0) | static_cast<size_t>(kind) << 8 | static_cast<size_t>(dtype) << 4 |
           static_cast<size_t>(op);
  }

  // Before anything runs.
  void use(std::vector<std::unique_ptr<Backend>> others, std::vector<uint8_t> table) {
    others_ = std::move(others);
    table_ = std::move(table);
  }

  Backend& of(const Signature& signature) {
    if (table_.empty()) return native_;
    const uint8_t chosen = table_[place_of(signature.kind, signature.dtype, signature.op, signature.is_on_device())];
    return chosen == 0 ? native_ : *others_[chosen - 1];
  }

 private:
  NativeBackend native_;
  std::vector<std::unique_ptr<Backend>> others_;
  std::vector<uint8_t> table_;  // empty: everything is native
};

}  // namespace ronde
