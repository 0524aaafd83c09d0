#include "engine/runner.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "engine/neutral.h"
#include "engine/scale.h"

namespace ronde {
namespace {

// Tensors begin on whole lines of the buffer, for the sake of the kernels.
constexpr size_t kAlignment = 64;
size_t padded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Larger tensors are not fused on one host: to copy them in and out would take longer than a collective of their own.
// Between hosts every collective waits for the network, and copying is cheap beside that.
constexpr size_t kLargestOnOneHost = 64 * 1024;
constexpr size_t kNoLimit = size_t{1} << 62;

bool is_reduction(Kind kind) { return kind == Kind::kAllreduce || kind == Kind::kReduceScatter; }

}  // namespace

Runner::Runner(Communicator& communicator, Recorder& recorder, std::byte* buffer, size_t buffer_bytes,
               bool keeps_groups_apart)
    : communicator_(communicator),
      backends_(communicator),
      recorder_(recorder),
      buffer_(buffer),
      buffer_bytes_(buffer_bytes),
      fusion_bytes_(buffer_bytes),
      keeps_groups_apart_(keeps_groups_apart),
      largest_fused_(communicator.ranks_of_host().size() == 1 ? kLargestOnOneHost : kNoLimit) {}

void Runner::set_fusion(size_t fusion_bytes, size_t largest_bytes) {
  fusion_bytes_ = std::min(fusion_bytes, buffer_bytes_);
  largest_fused_ = largest_bytes;
}

void Runner::forget() { absent_ = {}; }

void Runner::run(std::span<const Work> batch, const std::function<void(const Work&)>& done) {
  left_.clear();
  for (const Work& work : batch) left_.push_back(&work);
  while (!left_.empty()) {
    bundle_.clear();
    rest_.clear();
    size_t bytes = 0;
    for (const Work* work : left_) {
      const bool fits = bundle_.empty() || fits_into(bytes, *bundle_.front(), *work);
      (fits ? bundle_ : rest_).push_back(work);
      if (fits) bytes += padded(buffered_bytes(*work));
    }
    recorder_.began(bundle_);
    if (bundle_.size() == 1 && !passes_through_buffer(*bundle_.front()->signature)) {
      run_one(*bundle_.front());
    } else {
      run_fused(bundle_);
    }
    recorder_.ended();
    for (const Work* work : bundle_) done(*work);
    left_.swap(rest_);
  }
}

// What it takes up in the buffer; the same on all ranks.
size_t Runner::buffered_bytes(const Work& work) const {
  if (work.signature->kind != Kind::kAllgather) return work.signature->bytes();
  return std::accumulate(work.rows->begin(), work.rows->end(), size_t{0}) * work.signature->row_bytes();
}

// Adasum in one host looks at everything twice, which it does in symmetric memory only if it may: to copy a tensor
// there and back costs less than that. (Small ones do not pass through memory at all.)
bool Runner::passes_through_buffer(const Signature& signature) const {
  return signature.op == ReduceOp::kAdasum && signature.bytes() > largest_fused_ &&
         padded(signature.bytes()) <= buffer_bytes_;
}

// Whether another tensor joins a bundle of so many bytes that begins with `first`.
bool Runner::fits_into(size_t bytes, const Work& first, const Work& other) {
  const bool is_large = std::max(buffered_bytes(first), buffered_bytes(other)) > largest_fused_;
  return may_fuse(first, other) && (!is_large || first.signature->op == ReduceOp::kAdasum) &&
         bytes + padded(buffered_bytes(other)) <= fusion_bytes_;
}

bool Runner::may_fuse(const Work& first, const Work& second) {
  const Signature &a = *first.signature, &b = *second.signature;
  if (a.kind != b.kind || a.device != b.device || a.is_on_device()) return false;
  if (&backends_.of(a) != &backends_.of(b)) return false;
  if (keeps_groups_apart_ && (first.is_grouped || second.is_grouped) && first.slot != second.slot) return false;
  if (a.kind == Kind::kAllgather) return true;
  return is_reduction(a.kind) && a.dtype == b.dtype && a.op == b.op && a.prescale == b.prescale &&
         a.postscale == b.postscale;
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
      return backends_.of(*work.signature).barrier();
    default:
      throw UsageError(std::string("the engine does not run ") + name_of(work.signature->kind));
  }
}

void Runner::run_fused(Bundle bundle) {
  switch (bundle.front()->signature->kind) {
    case Kind::kReduceScatter:
      return reduce_scatter_fused(bundle);
    case Kind::kAllgather:
      return allgather_fused(bundle);
    default:
      return allreduce_fused(bundle);
  }
}

// --- Reductions ----------------------------------------------------------------------------------------------------

// An average of integers is a sum, divided and rounded down afterwards; so is, of any type, one to which not all ranks
// contribute.
ReduceOp Runner::operation(const Work& work) const {
  const Signature& signature = *work.signature;
  const bool is_plain = work.contributors == communicator_.size() && !is_integer(signature.dtype);
  return signature.op == ReduceOp::kAverage && !is_plain ? ReduceOp::kSum : signature.op;
}

void Runner::finish(const Work& work, void* out, size_t count) {
  const Signature& signature = *work.signature;
  if (signature.op == ReduceOp::kAverage && is_integer(signature.dtype)) {
    floor_divide(signature.dtype, out, count, work.contributors);
  } else if (operation(work) != signature.op) {
    scale(signature.dtype, out, out, count, 1.0 / work.contributors);
  }
  if (signature.postscale != 1.0) scale(signature.dtype, out, out, count, signature.postscale);
}

// The input, times the factor that comes before the sum. `into` may be the input itself.
const void* Runner::prescaled(const Work& work, void* into) {
  const Signature& signature = *work.signature;
  if (signature.prescale == 1.0) return work.in;
  scale(signature.dtype, into, work.in, signature.count(), signature.prescale);
  return into;
}

// What this rank contributes, at its place in the buffer.
void Runner::put_in(const Work& work, std::byte* place) {
  const Signature& signature = *work.signature;
  if (work.is_absent) return fill_neutral(signature.dtype, signature.op, place, signature.count());
  if (prescaled(work, place) != place && signature.count() > 0) std::memcpy(place, work.in, signature.bytes());
}

void Runner::allreduce(const Work& work) {
  const Signature& signature = *work.signature;
  const void* in = work.in;
  void* out = work.out;
  if (work.is_absent) {
    absent_.resize(std::max(absent_.size(), signature.bytes()));
    in = out = absent_.data();
    put_in(work, absent_.data());
  } else {
    in = prescaled(work, out);
  }
  backends_.of(*work.signature).allreduce(in, out, signature.count(), signature.dtype, operation(work));
  if (!work.is_absent) finish(work, out, signature.count());
}

void Runner::allreduce_fused(Bundle bundle) {
  const Work& first = *bundle.front();
  const DType dtype = first.signature->dtype;
  const bool is_adasum = first.signature->op == ReduceOp::kAdasum;
  counts_.clear();
  size_t offset = 0;
  for (const Work* work : bundle) {
    std::byte* const place = buffer_ + offset;
    const size_t bytes = work->signature->bytes();
    put_in(*work, place);
    if (is_adasum) std::memset(place + bytes, 0, padded(bytes) - bytes);  // it counts in the products
    counts_.push_back(padded(bytes) / size_of(dtype));
    offset += padded(bytes);
  }
  recorder_.fused();
  const size_t count = offset / size_of(dtype);
  if (is_adasum) {
    communicator_.adasum(buffer_, buffer_, counts_, dtype);
  } else {
    backends_.of(*first.signature).allreduce(buffer_, buffer_, count, dtype, operation(first));
  }
  finish(first, buffer_, count);
  recorder_.ran();
  offset = 0;
  for (const Work* work : bundle) {
    if (!work->is_absent && work->signature->count() > 0) {
      std::memcpy(work->out, buffer_ + offset, work->signature->bytes());
    }
    offset += padded(work->signature->bytes());
  }
}

// The rows that a rank gets of a reduce-scatter, or gives to an all-gather.
size_t Runner::rows_of(const Work& work, int rank) const {
  if (work.signature->kind == Kind::kAllgather) return (*work.rows)[rank];
  const auto size = static_cast<size_t>(communicator_.size());
  return work.signature->rows() / size + (static_cast<size_t>(rank) < work.signature->rows() % size ? 1 : 0);
}

void Runner::reduce_scatter(const Work& work) {
  const Signature& signature = *work.signature;
  const int size = communicator_.size();
  std::vector<size_t> counts;
  for (int rank = 0; rank < size; ++rank) counts.push_back(rows_of(work, rank) * signature.row_items());
  const size_t own = counts[communicator_.rank()];
  const void* in = work.in;
  void* out = work.out;
  if (work.is_absent) {
    absent_.resize(std::max(absent_.size(), signature.bytes() + own * size_of(signature.dtype)));
    put_in(work, absent_.data());
    in = absent_.data();
    out = absent_.data() + signature.bytes();
  } else if (signature.prescale != 1.0) {
    scratch_.resize(std::max(scratch_.size(), signature.bytes()));
    in = prescaled(work, scratch_.data());
  }
  backends_.of(*work.signature).reduce_scatter(in, out, counts, signature.dtype, operation(work));
  if (!work.is_absent) finish(work, out, own);
}

// In the buffer lies what goes to rank 0, of every tensor, then what goes to rank 1, and so on.
void Runner::reduce_scatter_fused(Bundle bundle) {
  const Work& first = *bundle.front();
  const DType dtype = first.signature->dtype;
  const int size = communicator_.size();
  std::vector<size_t> counts(size);
  size_t largest = 0;
  for (const Work* work : bundle) {
    largest = std::max(largest, work->signature->bytes());
    for (int rank = 0; rank < size; ++rank) counts[rank] += rows_of(*work, rank) * work->signature->row_items();
  }
  std::vector<size_t> offsets(size);  // bytes
  for (int rank = 1; rank < size; ++rank) offsets[rank] = offsets[rank - 1] + counts[rank - 1] * size_of(dtype);
  const size_t own_bytes = counts[communicator_.rank()] * size_of(dtype);
  scratch_.resize(std::max({scratch_.size(), largest, own_bytes}));
  for (const Work* work : bundle) {
    put_in(*work, scratch_.data());
    const std::byte* from = scratch_.data();
    for (int rank = 0; rank < size; ++rank) {
      const size_t bytes = rows_of(*work, rank) * work->signature->row_bytes();
      if (bytes > 0) std::memcpy(buffer_ + offsets[rank], from, bytes);
      offsets[rank] += bytes;
      from += bytes;
    }
  }
  recorder_.fused();
  backends_.of(*first.signature).reduce_scatter(buffer_, scratch_.data(), counts, dtype, operation(first));
  finish(first, scratch_.data(), counts[communicator_.rank()]);
  recorder_.ran();
  const std::byte* from = scratch_.data();
  for (const Work* work : bundle) {
    const size_t bytes = rows_of(*work, communicator_.rank()) * work->signature->row_bytes();
    if (!work->is_absent && bytes > 0) std::memcpy(work->out, from, bytes);
    from += bytes;
  }
}

// --- The others ----------------------------------------------------------------------------------------------------

void Runner::allgather(const Work& work) {
  std::vector<size_t> sizes(work.rows->begin(), work.rows->end());
  for (size_t& size : sizes) size *= work.signature->row_bytes();
  void* out = work.out;
  if (work.is_absent) {
    absent_.resize(std::max(absent_.size(), buffered_bytes(work)));
    out = absent_.data();
  }
  backends_.of(*work.signature).allgather(work.in, out, sizes, work.signature->dtype);
}

// In the buffer lies what comes from rank 0, of every tensor, then what comes from rank 1, and so on.
void Runner::allgather_fused(Bundle bundle) {
  const int size = communicator_.size(), own = communicator_.rank();
  std::vector<size_t> sizes(size);
  for (const Work* work : bundle) {
    for (int rank = 0; rank < size; ++rank) sizes[rank] += rows_of(*work, rank) * work->signature->row_bytes();
  }
  scratch_.resize(std::max(scratch_.size(), sizes[own]));
  std::byte* to = scratch_.data();
  for (const Work* work : bundle) {
    const size_t bytes = rows_of(*work, own) * work->signature->row_bytes();
    if (bytes > 0) std::memcpy(to, work->in, bytes);
    to += bytes;
  }
  recorder_.fused();
  backends_.of(*bundle.front()->signature).allgather(scratch_.data(), buffer_, sizes, DType::kUint8);
  recorder_.ran();
  std::vector<std::byte*> outs;
  for (const Work* work : bundle) outs.push_back(static_cast<std::byte*>(work->out));
  const std::byte* from = buffer_;
  for (int rank = 0; rank < size; ++rank) {
    for (size_t i = 0; i < bundle.size(); ++i) {
      const size_t bytes = rows_of(*bundle[i], rank) * bundle[i]->signature->row_bytes();
      if (!bundle[i]->is_absent && bytes > 0) {
        std::memcpy(outs[i], from, bytes);
        outs[i] += bytes;
      }
      from += bytes;
    }
  }
}

void Runner::alltoall(const Work& work) {
  const auto size = static_cast<size_t>(communicator_.size());
  const auto own = static_cast<size_t>(communicator_.rank());
  std::vector<size_t> in_sizes(size), out_sizes(size);
  for (size_t rank = 0; rank < size; ++rank) {
    in_sizes[rank] = (*work.rows)[own * size + rank] * work.signature->row_bytes();
    out_sizes[rank] = (*work.rows)[rank * size + own] * work.signature->row_bytes();
  }
  backends_.of(*work.signature).alltoall(work.in, in_sizes, work.out, out_sizes, work.signature->dtype);
}

void Runner::broadcast(const Work& work) {
  const Signature& signature = *work.signature;
  void* out = work.out;
  if (work.is_absent) {
    absent_.resize(std::max(absent_.size(), signature.bytes()));
    out = absent_.data();
  } else if (communicator_.rank() == signature.root && work.in != out && signature.count() > 0) {
    std::memcpy(out, work.in, signature.bytes());
  }
  backends_.of(*work.signature).broadcast(out, signature.count(), signature.dtype, signature.root);
}

}  // namespace ronde
