#include "engine/runner.h"

#include <algorithm>
#include <cstring>

#include "engine/scale.h"

namespace ronde {
namespace {

// Tensors begin on whole lines of the buffer, for the sake of the kernels.
constexpr size_t kAlignment = 64;
size_t padded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Larger tensors are not fused on one host: to copy them in and out would take longer than a collective of their own.
// Between hosts every collective waits for the network, and copying is cheap beside that.
constexpr size_t kLargestOnOneHost = 64 * 1024;

bool fuse_together(const Signature& a, const Signature& b) {
  return a.kind == Kind::kAllreduce && b.kind == Kind::kAllreduce && a.dtype == b.dtype && a.op == b.op &&
         a.prescale == b.prescale && a.postscale == b.postscale;
}

// An average of integers is a sum, divided and rounded down afterwards.
bool is_integer_average(const Signature& signature) {
  return signature.op == ReduceOp::kAverage && is_integer(signature.dtype);
}

ReduceOp operation(const Signature& signature) { return is_integer_average(signature) ? ReduceOp::kSum : signature.op; }

}  // namespace

Runner::Runner(Communicator& communicator, Recorder& recorder, std::byte* buffer, size_t buffer_bytes)
    : communicator_(communicator),
      recorder_(recorder),
      buffer_(buffer),
      buffer_bytes_(buffer_bytes),
      largest_fused_(communicator.ranks_of_host().size() == 1 ? kLargestOnOneHost : SIZE_MAX) {}

void Runner::run(std::span<const Work> batch, const std::function<void(const Work&)>& done) {
  left_.clear();
  for (const Work& work : batch) left_.push_back(&work);
  while (!left_.empty()) {
    group_.clear();
    rest_.clear();
    size_t bytes = 0;
    for (const Work* work : left_) {
      const bool fits = group_.empty() || fits_into(bytes, *group_.front()->signature, *work->signature);
      (fits ? group_ : rest_).push_back(work);
      if (fits) bytes += padded(work->signature->bytes());
    }
    recorder_.began(group_);
    if (group_.size() == 1) {
      run_one(*group_.front());
    } else {
      allreduce_fused(group_);
    }
    recorder_.ended();
    for (const Work* work : group_) done(*work);
    left_.swap(rest_);
  }
}

// Whether another tensor joins a group of so many bytes that begins with `first`.
bool Runner::fits_into(size_t bytes, const Signature& first, const Signature& other) const {
  return std::max(first.bytes(), other.bytes()) <= largest_fused_ && bytes + padded(other.bytes()) <= buffer_bytes_ &&
         fuse_together(first, other);
}

void Runner::run_one(const Work& work) {
  switch (work.signature->kind) {
    case Kind::kAllreduce:
      return allreduce(work);
    case Kind::kReduceScatter:
      return reduce_scatter(work);
    case Kind::kAllgather:
      return allgather(work);
    case Kind::kBroadcast:
      return broadcast(work);
    case Kind::kAlltoall:
      return alltoall(work);
    case Kind::kBarrier:
      return communicator_.barrier();
    default:
      throw UsageError(std::string("the engine does not run ") + name_of(work.signature->kind));
  }
}

// The input, times the factor that comes before the sum. `into` may be the input itself.
const void* Runner::prescaled(const Work& work, void* into) {
  const Signature& signature = *work.signature;
  if (signature.prescale == 1.0) return work.in;
  scale(signature.dtype, into, work.in, signature.count(), signature.prescale);
  return into;
}

void Runner::finish(const Signature& signature, void* out, size_t count) {
  if (is_integer_average(signature)) floor_divide(signature.dtype, out, count, communicator_.size());
  if (signature.postscale != 1.0) scale(signature.dtype, out, out, count, signature.postscale);
}

void Runner::allreduce(const Work& work) {
  const Signature& signature = *work.signature;
  const void* in = prescaled(work, work.out);
  communicator_.allreduce(in, work.out, signature.count(), signature.dtype, operation(signature));
  finish(signature, work.out, signature.count());
}

void Runner::allreduce_fused(std::span<const Work* const> group) {
  const Signature& common = *group.front()->signature;
  size_t offset = 0;
  for (const Work* work : group) {
    std::byte* const place = buffer_ + offset;
    if (prescaled(*work, place) != place && work->signature->count() > 0) {
      std::memcpy(place, work->in, work->signature->bytes());
    }
    offset += padded(work->signature->bytes());
  }
  recorder_.fused();
  const size_t count = offset / size_of(common.dtype);
  communicator_.allreduce(buffer_, buffer_, count, common.dtype, operation(common));
  finish(common, buffer_, count);
  recorder_.ran();
  offset = 0;
  for (const Work* work : group) {
    if (work->signature->count() > 0) std::memcpy(work->out, buffer_ + offset, work->signature->bytes());
    offset += padded(work->signature->bytes());
  }
}

void Runner::reduce_scatter(const Work& work) {
  const Signature& signature = *work.signature;
  const auto size = static_cast<size_t>(communicator_.size());
  std::vector<size_t> counts(size, signature.rows() / size * signature.row_items());
  for (size_t rank = 0; rank < signature.rows() % size; ++rank) counts[rank] += signature.row_items();
  if (signature.prescale != 1.0) scratch_.resize(signature.bytes());
  const void* in = prescaled(work, scratch_.data());
  communicator_.reduce_scatter(in, work.out, counts, signature.dtype, operation(signature));
  finish(signature, work.out, counts[communicator_.rank()]);
}

void Runner::allgather(const Work& work) {
  std::vector<size_t> sizes(work.rows->begin(), work.rows->end());
  for (size_t& size : sizes) size *= work.signature->row_bytes();
  communicator_.allgather(work.in, work.out, sizes, work.signature->dtype);
}

void Runner::alltoall(const Work& work) {
  const auto size = static_cast<size_t>(communicator_.size());
  const auto own = static_cast<size_t>(communicator_.rank());
  std::vector<size_t> in_sizes(size), out_sizes(size);
  for (size_t rank = 0; rank < size; ++rank) {
    in_sizes[rank] = (*work.rows)[own * size + rank] * work.signature->row_bytes();
    out_sizes[rank] = (*work.rows)[rank * size + own] * work.signature->row_bytes();
  }
  communicator_.alltoall(work.in, in_sizes, work.out, out_sizes, work.signature->dtype);
}

void Runner::broadcast(const Work& work) {
  const Signature& signature = *work.signature;
  if (communicator_.rank() == signature.root && work.in != work.out && signature.count() > 0) {
    std::memcpy(work.out, work.in, signature.bytes());
  }
  communicator_.broadcast(work.out, signature.count(), signature.dtype, signature.root);
}

}  // namespace ronde
