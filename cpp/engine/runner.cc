#include "engine/runner.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "engine/neutral.h"
#include "kernels/scale.h"

namespace ronde {
namespace {

// Tensors begin at cache lines of the buffer, for the kernels.
constexpr size_t kAlignmentBytes = 64;
size_t padded(size_t bytes) { return (bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes; }

// Larger tensors are not fused on one host, where copying them in and out would take longer than a separate collective.
// Between hosts every collective waits for the network, compared to which copying is cheap.
constexpr size_t kLargestOnOneHost = 64 * 1024;
constexpr size_t kNoLimit = size_t{1} << 62;

bool is_reduction(Kind kind) { return kind == Kind::kAllreduce || kind == Kind::kReduceScatter; }

// The type of a reduction's elements in the buffer. 16-bit floats with a factor are float32 from the first factor to
// the last and are rounded once, because intermediate values may exceed the range of 16 bits.
DType working_type(const Signature& signature) {
  const bool is_scaled = signature.prescale != 1.0 || signature.postscale != 1.0;
  return is_reduction(signature.kind) && is_scaled && is_small_float(signature.dtype) ? DType::kFloat32
                                                                                      : signature.dtype;
}
size_t working_bytes(const Signature& signature) { return signature.count() * size_of(working_type(signature)); }

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

void Runner::free_neutral() { absent_ = {}; }

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

// The tensor's bytes in the buffer; the same on all ranks.
size_t Runner::buffered_bytes(const Work& work) const {
  if (work.signature->kind != Kind::kAllgather) return working_bytes(*work.signature);
  return std::accumulate(work.rows->begin(), work.rows->end(), size_t{0}) * work.signature->row_bytes();
}

// Adasum in one host reads everything twice. In symmetric memory it reads in place, and copying a tensor there and back
// costs less than reading it twice through staging lanes. (Small tensors need no staging.)
bool Runner::passes_through_buffer(const Signature& signature) const {
  const size_t bytes = working_bytes(signature);
  return signature.op == ReduceOp::kAdasum && bytes > largest_fused_ && padded(bytes) <= buffer_bytes_;
}

// Whether another tensor joins a bundle of `bytes` bytes that begins with `first`.
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
  if (first.contributors != second.contributors) return false;  // a rank has joined between the two
  // The order in which Adasum adds products depends on the tensor's place in the buffer. With float64 vectors that
  // order would change the result.
  if (a.op == ReduceOp::kAdasum && a.dtype == DType::kFloat64) return false;
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

// Writes this rank's contribution to its place in the buffer, in the working type and times the prescale factor.
void Runner::load_input(const Work& work, std::byte* place) {
  const Signature& signature = *work.signature;
  const DType working = working_type(signature);
  if (work.is_absent) {
    return fill_neutral(working, signature.op, place, signature.count(), backends_.is_native(signature));
  }
  if (working != signature.dtype) {
    auto* const wide = reinterpret_cast<float*>(place);
    return scale_to_float32(signature.dtype, wide, work.in, signature.count(), signature.prescale);
  }
  scale(signature.dtype, place, work.in, signature.count(), signature.prescale);
}

// Writes the result, `count` elements of the working type times the postscale factor, to the program's memory. Both may
// be the same memory.
void Runner::store_result(const Work& work, const std::byte* result, size_t count) {
  const Signature& signature = *work.signature;
  if (work.is_absent) return;
  if (working_type(signature) != signature.dtype) {
    const auto* const wide = reinterpret_cast<const float*>(result);
    return scale_from_float32(signature.dtype, work.out, wide, count, signature.postscale);
  }
  scale(signature.dtype, work.out, result, count, signature.postscale);
}

void Runner::allreduce(const Work& work) {
  const Signature& signature = *work.signature;
  const bool is_plain = !work.is_absent && working_type(signature) == signature.dtype;
  const void* in = work.in;
  auto* out = static_cast<std::byte*>(work.out);
  if (!is_plain || signature.prescale != 1.0) {
    std::vector<std::byte>& memory = work.is_absent ? absent_ : scratch_;
    if (!is_plain) {
      memory.resize(std::max(memory.size(), working_bytes(signature)));
      out = memory.data();
    }
    load_input(work, out);
    in = out;
  }
  backends_.of(signature).allreduce(in, out, signature.count(), working_type(signature), signature.op,
                                    work.contributors);
  store_result(work, out, signature.count());
}

void Runner::allreduce_fused(Bundle bundle) {
  const Work& first = *bundle.front();
  const DType dtype = working_type(*first.signature);
  const bool is_adasum = first.signature->op == ReduceOp::kAdasum;
  counts_.clear();
  size_t offset = 0;
  for (const Work* work : bundle) {
    std::byte* const place = buffer_ + offset;
    const size_t bytes = buffered_bytes(*work);
    load_input(*work, place);
    if (is_adasum) std::memset(place + bytes, 0, padded(bytes) - bytes);  // the padding is part of the products
    counts_.push_back(padded(bytes) / size_of(dtype));
    offset += padded(bytes);
  }
  recorder_.fused();
  if (is_adasum) {
    communicator_.adasum(buffer_, buffer_, counts_, dtype);
  } else {
    backends_.of(*first.signature)
        .allreduce(buffer_, buffer_, offset / size_of(dtype), dtype, first.signature->op, first.contributors);
  }
  recorder_.ran();
  offset = 0;
  for (const Work* work : bundle) {
    store_result(*work, buffer_ + offset, work->signature->count());
    offset += padded(buffered_bytes(*work));
  }
}

// The rows that a rank gets from a reduce-scatter, or contributes to an all-gather.
size_t Runner::rows_of(const Work& work, int rank) const {
  if (work.signature->kind == Kind::kAllgather) return (*work.rows)[rank];
  const auto size = static_cast<size_t>(communicator_.size());
  return work.signature->rows() / size + (static_cast<size_t>(rank) < work.signature->rows() % size ? 1 : 0);
}

void Runner::reduce_scatter(const Work& work) {
  const Signature& signature = *work.signature;
  const DType working = working_type(signature);
  std::vector<size_t> counts;
  for (int rank = 0; rank < communicator_.size(); ++rank) {
    counts.push_back(rows_of(work, rank) * signature.row_items());
  }
  const size_t own = counts[communicator_.rank()];
  const void* in = work.in;
  auto* out = static_cast<std::byte*>(work.out);
  if (work.is_absent || working != signature.dtype || signature.prescale != 1.0) {
    std::vector<std::byte>& memory = work.is_absent ? absent_ : scratch_;
    const size_t in_bytes = padded(working_bytes(signature));
    memory.resize(std::max(memory.size(), in_bytes + own * size_of(working)));
    load_input(work, memory.data());
    in = memory.data();
    if (work.is_absent || working != signature.dtype) out = memory.data() + in_bytes;
  }
  backends_.of(signature).reduce_scatter(in, out, counts, working, signature.op, work.contributors);
  store_result(work, out, own);
}

// The buffer holds rank 0's part of every tensor, then rank 1's part of every tensor, and so on.
void Runner::reduce_scatter_fused(Bundle bundle) {
  const Work& first = *bundle.front();
  const DType dtype = working_type(*first.signature);
  const int size = communicator_.size(), own = communicator_.rank();
  const auto items_of = [&](const Work& work, int rank) { return rows_of(work, rank) * work.signature->row_items(); };
  std::vector<size_t> counts(size);
  size_t largest = 0;
  for (const Work* work : bundle) {
    largest = std::max(largest, buffered_bytes(*work));
    for (int rank = 0; rank < size; ++rank) counts[rank] += items_of(*work, rank);
  }
  std::vector<size_t> offsets(size);  // bytes
  for (int rank = 1; rank < size; ++rank) offsets[rank] = offsets[rank - 1] + counts[rank - 1] * size_of(dtype);
  scratch_.resize(std::max({scratch_.size(), largest, counts[own] * size_of(dtype)}));
  for (const Work* work : bundle) {
    load_input(*work, scratch_.data());
    const std::byte* from = scratch_.data();
    for (int rank = 0; rank < size; ++rank) {
      const size_t bytes = items_of(*work, rank) * size_of(dtype);
      if (bytes > 0) std::memcpy(buffer_ + offsets[rank], from, bytes);
      offsets[rank] += bytes;
      from += bytes;
    }
  }
  recorder_.fused();
  backends_.of(*first.signature)
      .reduce_scatter(buffer_, scratch_.data(), counts, dtype, first.signature->op, first.contributors);
  recorder_.ran();
  const std::byte* from = scratch_.data();
  for (const Work* work : bundle) {
    store_result(*work, from, items_of(*work, own));
    from += items_of(*work, own) * size_of(dtype);
  }
}

// --- Other operations ----------------------------------------------------------------------------------------------

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

// The buffer holds the rows of every tensor from rank 0, then those from rank 1, and so on.
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
