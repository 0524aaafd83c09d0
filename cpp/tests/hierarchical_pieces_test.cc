// Hierarchical collectives of arrays that are large enough for pieces, with threads as ranks: results, calls that
// differ, and failures in the middle. The sockets between the hosts have room for less than a piece, so a rank that did
// not drive its links while it waits for its host would hang.
#include "algorithms/hierarchical_pieces.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "rank_communicators.h"

namespace ronde {
namespace {

using namespace testing;

constexpr size_t kCount = 1'300'003;  // in pieces with every number of ranks here

// Small integers, so that sums are exact in bfloat16, too; different in all pieces.
float input(int rank, size_t index) {
  return static_cast<float>((index * 7 + index / 977 + static_cast<size_t>(rank) * 5) % 16);
}

template <class T>
T as(float value) {
  if constexpr (std::is_same_v<T, uint16_t>) return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  return static_cast<T>(value);
}

template <class T>
std::vector<T> inputs(int rank, size_t begin, size_t count) {
  std::vector<T> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = as<T>(input(rank, begin + i));
  return all;
}

template <class T>
std::vector<T> sums(int size, size_t begin, size_t count) {
  std::vector<T> all(count);
  for (size_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int rank = 0; rank < size; ++rank) sum += input(rank, begin + i);
    all[i] = as<T>(sum);
  }
  return all;
}

// The ranks of a host come later than the others, whose messages pile up meanwhile.
void come_late(const Communicator& comm, const std::vector<int>& host_of, int host) {
  if (host_of[static_cast<size_t>(comm.rank())] == host) std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

// Different for all ranks, and nothing for the second one.
std::vector<size_t> uneven_counts(int size) {
  std::vector<size_t> counts;
  for (int rank = 0; rank < size; ++rank)
    counts.push_back(rank == 1 ? 0 : kCount / 2 + static_cast<size_t>(rank) * 977);
  return counts;
}

template <class T>
void check_reductions(Communicator& comm, DType dtype, const std::vector<int>& host_of) {
  const int size = comm.size(), rank = comm.rank();
  const std::vector<T> mine = inputs<T>(rank, 0, kCount), expected = sums<T>(size, 0, kCount);
  std::vector<T> out(kCount), in_place = mine;
  comm.allreduce(mine.data(), out.data(), kCount, dtype, ReduceOp::kSum);
  CHECK(out == expected);
  comm.allreduce(in_place.data(), in_place.data(), kCount, dtype, ReduceOp::kSum);
  CHECK(in_place == expected);
  for (int root = 0; root < size; ++root) {
    std::vector<T> at_root(rank == root ? kCount : 0);
    come_late(comm, host_of, host_of[static_cast<size_t>(root)]);
    comm.reduce(mine.data(), rank == root ? at_root.data() : nullptr, kCount, dtype, ReduceOp::kSum, root);
    if (rank == root) CHECK(at_root == expected);
  }
  const std::vector<size_t> counts = uneven_counts(size);
  const auto begin = std::accumulate(counts.begin(), counts.begin() + rank, size_t{0});
  std::vector<T> all = inputs<T>(rank, 0, std::accumulate(counts.begin(), counts.end(), size_t{0}));
  T* const part = all.data() + begin;  // in place
  come_late(comm, host_of, 1);
  comm.reduce_scatter(all.data(), part, counts, dtype, ReduceOp::kSum);
  CHECK(std::ranges::equal(std::span(part, counts[rank]), sums<T>(size, begin, counts[rank])));
}

// Parts around the smallest for which there are pieces, where the pieces are the shortest.
void check_smallest_pieces(Communicator& comm) {
  for (const size_t count : {131'071, 131'072, 174'000, 174'759, 174'760, 174'800, 174'848, 262'143, 262'144}) {
    const std::vector<size_t> counts(static_cast<size_t>(comm.size()), count);
    const std::vector<float> mine = inputs<float>(comm.rank(), 0, count * counts.size());
    std::vector<float> part(count);
    comm.reduce_scatter(mine.data(), part.data(), counts, DType::kFloat32, ReduceOp::kSum);
    CHECK(part == sums<float>(comm.size(), count * static_cast<size_t>(comm.rank()), count));
  }
}

void check_allgather(Communicator& comm) {
  const std::vector<size_t> counts = uneven_counts(comm.size());
  std::vector<size_t> sizes;
  std::vector<float> expected;
  for (int rank = 0; rank < comm.size(); ++rank) {
    sizes.push_back(counts[rank] * sizeof(float));
    const std::vector<float> block = inputs<float>(rank, 0, counts[rank]);
    expected.insert(expected.end(), block.begin(), block.end());
  }
  const std::vector<float> mine = inputs<float>(comm.rank(), 0, counts[comm.rank()]);
  std::vector<float> out(expected.size());
  comm.allgather(mine.data(), out.data(), sizes, DType::kFloat32);
  CHECK(out == expected);
  const auto begin = std::accumulate(counts.begin(), counts.begin() + comm.rank(), size_t{0});
  std::fill(out.begin(), out.end(), 0.0f);
  std::copy(mine.begin(), mine.end(), out.begin() + static_cast<ptrdiff_t>(begin));
  comm.allgather(out.data() + begin, out.data(), sizes, DType::kFloat32);  // in place
  CHECK(out == expected);
}

// The array of a rank is in symmetric memory of its host.
void check_symmetric(const std::vector<int>& host_of) {
  constexpr size_t kBytes = kCount * sizeof(float);
  const auto hosts = static_cast<size_t>(*std::ranges::max_element(host_of)) + 1;
  std::vector<std::shared_ptr<Mapping>> memory;
  for (size_t host = 0; host < hosts; ++host) memory.push_back(shared_memory(kBytes * host_of.size()));
  run(host_of, {}, [&](Communicator& comm) {
    const uint32_t number =
        comm.symmetric()->add(memory[static_cast<size_t>(host_of[comm.rank()])], kBytes, comm.local_rank());
    auto* x = reinterpret_cast<float*>(comm.symmetric()->own_part(number));
    std::ranges::copy(inputs<float>(comm.rank(), 0, kCount), x);
    comm.allreduce(x, x, kCount, DType::kFloat32, ReduceOp::kSum);
    CHECK(std::ranges::equal(std::span(x, kCount), sums<float>(comm.size(), 0, kCount)));
    comm.barrier();
    comm.symmetric()->drop(number);
  });
}

// The hosts pass different counts, so they differ in the pieces, too. All ranks fail, and none waits for ever.
void check_mismatch(const std::vector<int>& host_of) {
  run(host_of, {}, [&](Communicator& comm) {
    const size_t count = kCount - 100'000 * static_cast<size_t>(host_of[comm.rank()]);
    std::vector<float> x(count);
    try {
      comm.allreduce(x.data(), x.data(), count, DType::kFloat32, ReduceOp::kSum);
      CHECK(false);
    } catch (const MismatchError& error) {
      CHECK(std::string(error.what()).find("1300003") != std::string::npos);
    } catch (const Failure&) {  // of a rank that has found it
    }
  });
}

// Rank 1 leaves out a call in which the others are.
void check_abort(const std::vector<int>& host_of) {
  run(host_of, {}, [](Communicator& comm) {
    std::vector<float> x(kCount);
    try {
      comm.allreduce(x.data(), x.data(), kCount, DType::kFloat32, ReduceOp::kSum);
      if (comm.rank() == 1) return comm.abort("enough");
      comm.allreduce(x.data(), x.data(), kCount, DType::kFloat32, ReduceOp::kSum);
      CHECK(false);
    } catch (const Failure& failure) {
      CHECK(failure.kind == FailureKind::kAborted && failure.rank == 1);
    }
  });
}

}  // namespace
}  // namespace ronde

int main() {
  using namespace ronde;
  for (const std::vector<int>& host_of :
       {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 0, 1, 1, 2, 2}, {1, 0, 1, 0, 1}}) {
    run(host_of, {}, [&](Communicator& comm) {
      check_reductions<float>(comm, DType::kFloat32, host_of);
      check_reductions<uint16_t>(comm, DType::kBfloat16, host_of);
      check_smallest_pieces(comm);
      check_allgather(comm);
    });
    check_symmetric(host_of);
    check_mismatch(host_of);
    check_abort(host_of);
  }
  std::puts("hierarchical_pieces_test: all passed");
}
