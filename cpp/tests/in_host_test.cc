// Collectives in shared memory among up to 64 ranks of one host, which are threads: with so many ranks, or little
// staging memory, lanes are smaller than the pieces that fewer ranks would use.
#include <sys/mman.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"
#include "host_group.h"
#include "host_segment.h"

namespace ronde {
namespace {

using Program = std::function<void(HostGroup&)>;

void run(int size, size_t staging_bytes, const Program& program) {
  const size_t bytes = HostSegment::bytes(size, staging_bytes);
  const int fd = memfd_create("test", MFD_CLOEXEC);
  CHECK(ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  HostSegment segment(std::make_shared<Mapping>(fd, bytes), size, staging_bytes);
  SymmetricSegments symmetric;
  FailureState failure;
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<BellHandle> bell_handles;
  for (int rank = 0; rank < size; ++rank) bell_handles.emplace_back(&segment.slot(rank).bell, -1);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Waiter waiter(bell_handles[static_cast<size_t>(rank)], failure, {.spins = 4});
      HostGroup group(segment, symmetric, ranks, rank, bell_handles, waiter);
      program(group);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

Call call_of(Kind kind, size_t count) {
  Call call;
  call.kind = kind;
  call.dtype = DType::kFloat32;
  call.count = count;
  return call;
}

// Whole numbers, so that sums are exact in any order.
float value_of(int rank, size_t index) { return static_cast<float>((index * 7 + static_cast<size_t>(rank)) % 31); }

std::vector<float> values_of(int rank, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = value_of(rank, i);
  return values;
}

std::vector<float> sums_of(int size, size_t count) {
  std::vector<float> sums(count);
  for (int rank = 0; rank < size; ++rank) {
    for (size_t i = 0; i < count; ++i) sums[i] += value_of(rank, i);
  }
  return sums;
}

void test_sums(int size, size_t staging_bytes, size_t count) {
  const std::vector<float> sums = sums_of(size, count);
  const Reduction sum{DType::kFloat32, ReduceOp::kSum, 1};
  run(size, staging_bytes, [&](HostGroup& group) {
    const std::vector<float> mine = values_of(group.index(), count);
    std::vector<float> all(count);
    group.allreduce(call_of(Kind::kAllreduce, count), sum, mine.data(), all.data(), count);
    CHECK(all == sums);
    const int root = size - 1;
    std::vector<float> at_root(count);
    group.reduce(call_of(Kind::kReduce, count), sum, mine.data(), at_root.data(), count, root);
    CHECK(group.index() != root || at_root == sums);

    const auto ranks = static_cast<size_t>(size);
    const auto index = static_cast<size_t>(group.index());
    std::vector<size_t> counts(ranks, count / ranks);
    counts.front() += count % ranks;
    std::vector<float> share(counts[index]);
    group.reduce_scatter(call_of(Kind::kReduceScatter, count), sum, mine.data(), counts, share.data());
    const size_t begin = index == 0 ? 0 : counts.front() + (index - 1) * counts[1];
    CHECK(std::equal(share.begin(), share.end(), sums.begin() + static_cast<ptrdiff_t>(begin)));
  });
}

void test_moves(int size, size_t staging_bytes, size_t count) {
  run(size, staging_bytes, [&](HostGroup& group) {
    const auto ranks = static_cast<size_t>(size);
    const std::vector<float> mine = values_of(group.index(), count);
    std::vector<size_t> sizes(ranks, count * sizeof(float)), offsets(ranks);
    std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), size_t{0});
    std::vector<float> all(ranks * count);
    group.share(call_of(Kind::kAllgather, 0), mine.data(), all.data(), {sizes, offsets});
    for (int rank = 0; rank < size; ++rank) {
      for (size_t i = 0; i < count; ++i) CHECK(all[static_cast<size_t>(rank) * count + i] == value_of(rank, i));
    }
    // Rank r sends rank p part number p of its values.
    const std::vector<float> given = values_of(group.index(), ranks * count);
    std::vector<float> taken(ranks * count);
    group.deal(call_of(Kind::kAlltoall, 0), given.data(), {sizes, offsets}, taken.data(), {sizes, offsets});
    const size_t begin = static_cast<size_t>(group.index()) * count;
    for (int rank = 0; rank < size; ++rank) {
      for (size_t i = 0; i < count; ++i)
        CHECK(taken[static_cast<size_t>(rank) * count + i] == value_of(rank, begin + i));
    }
  });
}

}  // namespace
}  // namespace ronde

int main() {
  for (const int size : {2, 3, 43, 48, 64}) ronde::test_sums(size, 256 * 1024, 200'000);
  for (const size_t staging_bytes : {1, 4096, 8192}) ronde::test_sums(3, staging_bytes, 50'000);
  ronde::test_moves(64, 256 * 1024, 3'000);
  ronde::test_moves(3, 1, 20'000);
  return 0;
}
