#include "communicator/collective.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <string>

#include "kernels/reduce.h"
#include "kernels/scale.h"
#include "waiting/call_terms.h"

namespace ronde {
namespace {

using Pieces = std::span<const Piece>;

bool has_root(Kind kind) {
  return kind == Kind::kReduce || kind == Kind::kBroadcast || kind == Kind::kGather || kind == Kind::kScatter;
}

bool has_factors(DType dtype) { return dtype >= DType::kFloat16; }

size_t bytes_of(Pieces pieces) {
  return std::accumulate(pieces.begin(), pieces.end(), size_t{0},
                         [](size_t sum, const Piece& piece) { return sum + piece.bytes; });
}

size_t sum_of(std::span<const size_t> sizes) { return std::accumulate(sizes.begin(), sizes.end(), size_t{0}); }

size_t offset_of(std::span<const size_t> sizes, int rank) { return sum_of(sizes.first(static_cast<size_t>(rank))); }

// The begin of the pieces' memory if they are adjacent. Null if they have no bytes.
std::optional<std::byte*> contiguous(Pieces pieces) {
  std::byte *begin = nullptr, *end = nullptr;
  for (const Piece& piece : pieces) {
    if (piece.bytes == 0) continue;
    if (begin != nullptr && piece.data != end) return std::nullopt;
    if (begin == nullptr) begin = piece.data;
    end = piece.data + piece.bytes;
  }
  return begin;
}

bool overlap(const std::byte* a, size_t a_bytes, const std::byte* b, size_t b_bytes) {
  const std::less<const std::byte*> before;
  return a_bytes > 0 && b_bytes > 0 && before(a, b + b_bytes) && before(b, a + a_bytes);
}

// Whether the pieces can be packed into `to`: each of them is either where it would be packed, or elsewhere.
bool can_be_packed_into(const std::byte* to, size_t bytes, Pieces pieces) {
  const std::byte* place = to;
  for (const Piece& piece : pieces) {
    if (piece.data != place && overlap(piece.data, piece.bytes, to, bytes)) return false;
    place += piece.bytes;
  }
  return true;
}

void pack(std::byte* to, Pieces pieces, DType dtype, double factor) {
  for (const Piece& piece : pieces) {
    if (factor != 1) {
      scale(dtype, to, piece.data, piece.bytes / size_of(dtype), factor);
    } else if (piece.bytes > 0 && to != piece.data) {
      std::memcpy(to, piece.data, piece.bytes);
    }
    to += piece.bytes;
  }
}

void unpack(const std::byte* from, Pieces pieces) {
  for (const Piece& piece : pieces) {
    if (piece.bytes > 0 && piece.data != from) std::memmove(piece.data, from, piece.bytes);
    from += piece.bytes;
  }
}

bool are_alike(Pieces a, Pieces b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Piece& x, const Piece& y) { return x.bytes == y.bytes; });
}

bool are_same(Pieces a, Pieces b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Piece& x, const Piece& y) { return x.data == y.data && x.bytes == y.bytes; });
}

// The number of pieces, from the first one on, that one call takes: a large piece, or all small ones before the next
// large one.
size_t count_for_one_call(Pieces pieces) {
  const auto is_large = [](const Piece& piece) { return piece.bytes >= Collective::kOwnCallBytes; };
  const auto large = std::find_if(pieces.begin(), pieces.end(), is_large);
  return large == pieces.begin() ? 1 : static_cast<size_t>(large - pieces.begin());
}

// --- Checks ---------------------------------------------------------------------------------------------------------

std::string bytes_text(size_t bytes) { return std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes"); }

std::string multiple_text(DType dtype) {
  return ", which must be a multiple of the size of a " + std::string(name_of(dtype)) + " value";
}

void check_sizes(Kind kind, const char* name, std::span<const size_t> sizes, int size, DType dtype) {
  if (sizes.size() != static_cast<size_t>(size)) {
    throw UsageError(std::string(name_of(kind)) + " needs " + name + " of all " + std::to_string(size) +
                     " ranks, not of " + std::to_string(sizes.size()));
  }
  for (const size_t bytes : sizes) {
    if (bytes % size_of(dtype) == 0) continue;
    throw UsageError(std::string(name) + " of " + name_of(kind) + " has " + bytes_text(bytes) + multiple_text(dtype));
  }
}

void check_memory(Kind kind, const char* name, Pieces pieces, size_t bytes, DType dtype) {
  for (const Piece& piece : pieces) {
    if (piece.data == nullptr && piece.bytes > 0) {
      throw UsageError(std::string("the address of a part of the ") + name + " of " + name_of(kind) + " is 0");
    }
    if (piece.bytes % size_of(dtype) == 0) continue;
    throw UsageError(std::string("a part of the ") + name + " of " + name_of(kind) + " has " + bytes_text(piece.bytes) +
                     multiple_text(dtype));
  }
  const size_t given = bytes_of(pieces);
  if (given == bytes) return;
  throw UsageError(std::string("the ") + name + " of " + name_of(kind) + " has " + bytes_text(given) +
                   " but must have " + std::to_string(bytes));
}

void check_reduction(const Collective& collective) {
  const bool is_whole = collective.op == ReduceOp::kAdasum && collective.kind == Kind::kAllreduce;
  if (!is_whole && !is_supported(collective.dtype, collective.op)) {
    throw UsageError(std::string("there is no ") + name_of(collective.op) + " of " + name_of(collective.dtype) +
                     " values in " + name_of(collective.kind));
  }
}

}  // namespace

void Collective::check(int rank, int size) const {
  if (static_cast<int>(dtype) >= kDTypeCount || static_cast<int>(op) >= kReduceOpCount ||
      static_cast<int>(kind) > static_cast<int>(Kind::kAlltoall)) {
    throw UsageError("a call queue has no such operation, type or reduction");
  }
  if (has_root(kind) && (root < 0 || root >= size)) {
    throw UsageError("root " + std::to_string(root) + " is not a rank of this communicator, which has ranks 0 to " +
                     std::to_string(size - 1));
  }
  if (reduces(kind)) check_reduction(*this);
  if (factor != 1 && !(reduces(kind) && has_factors(dtype))) {
    throw UsageError(std::string("a factor needs a reduction of floating or complex values, not ") + name_of(kind) +
                     " of " + name_of(dtype));
  }
  const bool is_root = rank == root;
  const auto own = static_cast<size_t>(rank);
  const auto check_input = [&](size_t bytes) { check_memory(kind, "input", inputs, bytes, dtype); };
  const auto check_output = [&](size_t bytes) { check_memory(kind, "output", outputs, bytes, dtype); };
  const auto check_in_sizes = [&] { check_sizes(kind, "in_sizes", in_sizes, size, dtype); };
  const auto check_out_sizes = [&] { check_sizes(kind, "out_sizes", out_sizes, size, dtype); };
  switch (kind) {
    case Kind::kAllreduce:
      check_input(bytes_of(inputs));
      return check_output(bytes_of(inputs));
    case Kind::kReduce:
      check_input(bytes_of(inputs));
      if (is_root) check_output(bytes_of(inputs));
      return;
    case Kind::kBroadcast:
      if (is_root) check_input(bytes_of(inputs));
      return check_output(is_root && !outputs.empty() ? bytes_of(inputs) : bytes_of(outputs));
    case Kind::kAllgather:
    case Kind::kGather:
      check_out_sizes();
      check_input(out_sizes[own]);
      if (kind == Kind::kAllgather || is_root) check_output(sum_of(out_sizes));
      return;
    case Kind::kReduceScatter:
    case Kind::kScatter:
      check_in_sizes();
      if (kind == Kind::kReduceScatter || is_root) check_input(sum_of(in_sizes));
      return check_output(in_sizes[own]);
    case Kind::kAlltoall:
      check_in_sizes();
      check_out_sizes();
      check_input(sum_of(in_sizes));
      return check_output(sum_of(out_sizes));
    default:
      return;
  }
}

// --- Calls ----------------------------------------------------------------------------------------------------------

void CollectiveRunner::run(const Collective& collective) {
  const WithCallTerms terms(collective.timeout_ns, &collective.posted_at);
  Pieces inputs = collective.inputs, outputs = collective.outputs;
  const bool is_root = communicator_.rank() == collective.root;
  switch (collective.kind) {
    case Kind::kBarrier:
      return communicator_.barrier();
    case Kind::kBroadcast:
      if (!is_root) inputs = outputs;
      if (outputs.empty()) outputs = inputs;
      break;
    case Kind::kReduce:
      if (!is_root) outputs = inputs;  // of the same sizes; the call does not use it
      break;
    case Kind::kAllreduce:
      break;
    default:
      return call(collective, inputs, outputs);
  }
  if (inputs.size() < 2 || !are_alike(inputs, outputs)) return call(collective, inputs, outputs);
  for (size_t first = 0; first < inputs.size();) {
    const size_t count = count_for_one_call(inputs.subspan(first));
    call(collective, inputs.subspan(first, count), outputs.subspan(first, count));
    first += count;
  }
}

void CollectiveRunner::call(const Collective& collective, Pieces inputs, Pieces outputs) {
  if (collective.kind == Kind::kBroadcast) return broadcast(collective, inputs, outputs);
  const bool is_for_root = collective.kind == Kind::kReduce || collective.kind == Kind::kGather;
  if (is_for_root && communicator_.rank() != collective.root) outputs = {};
  if (collective.kind == Kind::kScatter && communicator_.rank() != collective.root) inputs = {};
  const Buffers buffers = prepare(collective, inputs, outputs);
  make_call(collective, buffers, bytes_of(inputs));
  if (!contiguous(outputs)) unpack(buffers.out, outputs);
}

void CollectiveRunner::broadcast(const Collective& collective, Pieces inputs, Pieces outputs) {
  const bool is_root = communicator_.rank() == collective.root;
  const size_t bytes = bytes_of(inputs);
  const auto memory = contiguous(inputs);
  std::byte* data = memory ? *memory : packed_input_.get(bytes);
  if (is_root && !memory) pack(data, inputs, collective.dtype, 1);
  communicator_.broadcast(data, bytes / size_of(collective.dtype), collective.dtype, collective.root);
  if (is_root ? !are_same(inputs, outputs) : !memory) unpack(data, outputs);
}

// Whether the communicator's operation takes this place of its input in relation to its output.
bool CollectiveRunner::may_lie_in_output(const Collective& collective, const std::byte* in,
                                         const std::byte* out) const {
  const int rank = communicator_.rank();
  switch (collective.kind) {
    case Kind::kAllreduce:
    case Kind::kReduce:
      return in == out;
    case Kind::kAllgather:
    case Kind::kGather:
      return in == out + offset_of(collective.out_sizes, rank);
    case Kind::kReduceScatter:
      return in + offset_of(collective.in_sizes, rank) == out;
    default:
      return false;
  }
}

CollectiveRunner::Buffers CollectiveRunner::prepare(const Collective& collective, Pieces inputs, Pieces outputs) {
  const size_t in_bytes = bytes_of(inputs), out_bytes = bytes_of(outputs);
  const auto from = contiguous(inputs), to = contiguous(outputs);
  Buffers buffers;
  buffers.out = to ? *to : packed_output_.get(out_bytes);
  const bool is_apart = from && !overlap(*from, in_bytes, buffers.out, out_bytes);
  const bool is_usable = from && (is_apart || may_lie_in_output(collective, *from, buffers.out));
  if (is_usable && collective.factor == 1) {
    buffers.in = *from;
    return buffers;
  }
  // An all-reduce, and a reduce on its root, then work in place in the output.
  const bool fits_output = reduces(collective.kind) && collective.kind != Kind::kReduceScatter && in_bytes == out_bytes;
  const bool uses_output = fits_output && can_be_packed_into(buffers.out, out_bytes, inputs);
  std::byte* packed = uses_output ? buffers.out : packed_input_.get(in_bytes);
  pack(packed, inputs, collective.dtype, collective.factor);
  buffers.in = packed;
  return buffers;
}

void CollectiveRunner::make_call(const Collective& collective, const Buffers& buffers, size_t bytes) {
  const auto& [in, out] = buffers;
  const DType dtype = collective.dtype;
  switch (collective.kind) {
    case Kind::kAllreduce:
      return communicator_.allreduce(in, out, bytes / size_of(dtype), dtype, collective.op);
    case Kind::kReduce:
      return communicator_.reduce(in, out, bytes / size_of(dtype), dtype, collective.op, collective.root);
    case Kind::kReduceScatter: {
      std::vector<size_t> counts = collective.in_sizes;
      for (size_t& count : counts) count /= size_of(dtype);
      return communicator_.reduce_scatter(in, out, counts, dtype, collective.op);
    }
    case Kind::kAllgather:
      return communicator_.allgather(in, out, collective.out_sizes, dtype);
    case Kind::kGather:
      return communicator_.gather(in, out, collective.out_sizes, dtype, collective.root);
    case Kind::kScatter:
      return communicator_.scatter(in, out, collective.in_sizes, dtype, collective.root);
    case Kind::kAlltoall:
      return communicator_.alltoall(in, collective.in_sizes, out, collective.out_sizes, dtype);
    default:
      return;
  }
}

}  // namespace ronde
