// A collective whose input and output are pieces of memory, and how it becomes calls of a communicator.
//
// The rules:
//   1. The pieces of `inputs`, one behind the other, are the input; those of `outputs` are the output. Memory is used
//      directly if the pieces are adjacent. Otherwise the input is packed into scratch memory before the call, and the
//      output unpacked after it.
//   2. An all-reduce, a reduce and a broadcast are several calls of the communicator if there are pieces of at least
//      kOwnCallBytes, because packing these takes longer than a call. Only the sizes of the pieces determine the calls,
//      never their addresses: the ranks must pass pieces of equal sizes in the same order.
//   3. The input does not change unless its memory is the output's, too. If a call fails, the output is undefined.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/scratch.h"
#include "base/types.h"
#include "communicator/communicator.h"

namespace ronde {

// Contiguous memory.
struct Piece {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

struct Collective {
  static constexpr size_t kOwnCallBytes = size_t{1} << 20;

  Kind kind = Kind::kBarrier;
  DType dtype = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  int root = -1;
  std::vector<Piece> inputs{};   // of a broadcast and a scatter: the root's
  std::vector<Piece> outputs{};  // of a reduce and a gather: the root's
  // Bytes by rank: of the input of a reduce-scatter, an all-to-all and a scatter; of the output of an all-gather, an
  // all-to-all and a gather. All ranks pass them, also where only the root has the memory.
  std::vector<size_t> in_sizes{}, out_sizes{};
  double factor = 1;        // of the input of a reduction of floating or complex values
  int64_t timeout_ns = 0;   // from the beginning of the first call; 0: the communicator's limit
  std::string posted_at{};  // "train.py:12", for stall reports; may be empty

  // Throws UsageError if a rank cannot make this collective as it is.
  void check(int rank, int size) const;
};

// Makes collectives, with scratch memory that they share. One thread at a time.
class CollectiveRunner {
 public:
  explicit CollectiveRunner(Communicator& communicator) : communicator_(communicator) {}

  // Throws what the communicator throws; its errors are described there.
  void run(const Collective& collective);

 private:
  using Pieces = std::span<const Piece>;
  // The memory of one call of the communicator.
  struct Buffers {
    const std::byte* in = nullptr;
    std::byte* out = nullptr;
  };

  void call(const Collective& collective, Pieces inputs, Pieces outputs);
  void broadcast(const Collective& collective, Pieces inputs, Pieces outputs);
  Buffers prepare(const Collective& collective, Pieces inputs, Pieces outputs);
  void make_call(const Collective& collective, const Buffers& buffers, size_t bytes);
  bool may_lie_in_output(const Collective& collective, const std::byte* in, const std::byte* out) const;

  Communicator& communicator_;
  Scratch packed_input_, packed_output_;
};

}  // namespace ronde
