// Collectives of a communicator whose ranks do not all know the sizes: each is two calls. The first one tells the sizes
// and brings small blocks along; the second one copies these, or runs the collective for known sizes.
#include <algorithm>
#include <array>
#include <string>
#include <thread>
#include <utility>

#include "communicator/communicator.h"
#include "communicator/run_call.h"

namespace ronde {

// The first call of two.
template <class Body>
void Communicator::run_first_step(const Call& call, Body&& body) {
  run(with_tags(call, true), [&](const Call& call) {
    body(call);
    begun_by_ = std::this_thread::get_id();
  });
}

// Throws unless the last call was the first one of two, and of this thread.
void Communicator::check_first_step() {
  if (std::exchange(begun_by_, {}) == std::this_thread::get_id()) return;
  throw Failure(FailureKind::kAborted, rank_,
                name_of_rank(rank_) + " aborted: another call interrupted a collective of several steps; " +
                    "let only one thread at a time use a communicator");
}

// The second call of two. Returns whether the first one has brought the blocks, after copying them.
bool Communicator::takes_carried(FunctionRef<void()> copy) {
  const Turn turn(*this);
  const bool are_carried = is_one_host() && host_->are_carried();
  guarded(current_, [&](const Call&) {
    check_first_step();
    if (are_carried) copy();
  });
  return are_carried;
}

void Communicator::begin_gather(const void* in, uint64_t rows, uint64_t items, DType dtype, int root, uint64_t shape,
                                std::span<uint64_t> rows_of_ranks) {
  const Kind kind = root < 0 ? Kind::kAllgather : Kind::kGather;
  run_first_step(make_call(kind, dtype, items, root, ReduceOp::kSum, shape), [&](const Call& call) {
    if (is_one_host()) return host_->tell_rows(call, in, rows, items * size_of(dtype), rows_of_ranks);
    exchange_over_links(call, rows, rows_of_ranks);
  });
}

void Communicator::end_gather(const void* in, void* out, std::span<const size_t> sizes, DType dtype, int root) {
  if (takes_carried([&] { host_->take_rows(in, out, {sizes, running_offsets(sizes)}, root); })) return;
  if (root < 0) return allgather(in, out, sizes, dtype);
  gather(in, out, sizes, dtype, root);
}

void Communicator::begin_alltoall(const void* in, std::span<const uint64_t> rows, uint64_t items, DType dtype,
                                  uint64_t shape, std::span<uint64_t> arriving) {
  run_first_step(make_call(Kind::kAlltoall, dtype, 0, -1, ReduceOp::kSum, shape), [&](const Call& call) {
    if (is_one_host()) return host_->tell_splits(call, in, rows, items * size_of(dtype), arriving);
    const std::vector<size_t> words(rows.size(), sizeof(uint64_t));
    alltoallv(*mesh_, call, rows.data(), words, arriving.data(), words);
  });
}

void Communicator::end_alltoall(const void* in, std::span<const size_t> in_sizes, void* out,
                                std::span<const size_t> out_sizes, DType dtype, uint64_t shape) {
  const auto copy = [&] {
    host_->take_splits(in, {in_sizes, running_offsets(in_sizes)}, out, {out_sizes, running_offsets(out_sizes)});
  };
  if (!takes_carried(copy)) alltoall(in, in_sizes, out, out_sizes, dtype, shape);
}

void Communicator::begin_scatter(std::vector<int64_t>& words, const void* in, std::span<const size_t> sizes, int root) {
  check_root(root);
  if (words.size() > kScatterWords) {
    throw UsageError("scatter takes arrays of up to " + std::to_string(kScatterWords - 1) + " axes, not " +
                     std::to_string(words.size() - 1) + "; reshape the array first");
  }
  std::array<int64_t, 1 + kScatterWords> message{static_cast<int64_t>(words.size())};
  const Call call = make_call(Kind::kScatter, DType::kInt64, is_one_host() ? 0 : message.size(), root);
  run_first_step(call, [&](const Call& call) {
    if (is_one_host()) return host_->tell_words(call, words, in, sizes);
    std::ranges::copy(words, message.begin() + 1);
    Hierarchy hierarchy = this->hierarchy();
    hierarchical_broadcast(hierarchy, call, message.data());
    if (rank_ != root) HostGroup::check_word_count(message[0], root);
    words.assign(message.begin() + 1, message.begin() + 1 + message[0]);
  });
}

void Communicator::end_scatter(const void* in, void* out, std::span<const size_t> sizes, DType dtype, int root) {
  if (!takes_carried([&] { host_->take_block(root, in, sizes, out); })) scatter(in, out, sizes, dtype, root);
}

}  // namespace ronde
