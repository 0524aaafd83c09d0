// The algorithms over links with threads as ranks: compares every collective with plain loops, and checks failures.
#include "algorithms/over_links.h"

#include <cmath>
#include <cstdint>
#include <numeric>

#include "algorithms/select.h"
#include "kernels/reduce.h"
#include "rank_threads.h"

using namespace ronde;
using namespace ronde::testing;

namespace {

constexpr int kMaxSize = 7;
constexpr int kSizes[] = {1, 2, 3, 4, 5, kMaxSize};
constexpr size_t kMaxCount = 100'003;  // larger than a segment and a pipe
constexpr size_t kCounts[] = {0, 1, 6, 1009, kMaxCount};
constexpr size_t kManySegments = 4096;

using Values = std::vector<float>;
using Allreduce = void (*)(const Group&, const Call&, const void*, void*, const Reduction&, Scratch&, size_t);

void doubling(const Group& group, const Call& call, const void* in, void* out, const Reduction& reduction,
              Scratch& scratch, size_t) {
  allreduce_doubling(group, call, in, out, reduction, scratch);
}

Call call_of(Kind kind, size_t count, ReduceOp op = ReduceOp::kSum, DType dtype = DType::kFloat32) {
  return {.sequence = 1, .count = count, .kind = kind, .dtype = dtype, .op = op};
}

Reduction reduction_of(const Call& call, int size) { return {call.dtype, call.op, size}; }

// Values whose sum depends on the order of addition: the first `count` of the rank's, which are computed once.
Values values_of(int rank, size_t count) {
  static const std::vector<Values> of_ranks = [] {
    std::vector<Values> all(kMaxSize, Values(kMaxCount));
    for (int r = 0; r < kMaxSize; ++r) {
      for (size_t i = 0; i < kMaxCount; ++i) {
        all[r][i] = std::ldexp(static_cast<float>((i * 2654435761u + r * 40503u) % 65521) - 30000.0f, r % 3 * 7);
      }
    }
    return all;
  }();
  const Values& values = of_ranks[rank];
  return {values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count)};
}

// Element by element, in rank order.
Values reduced(const std::vector<int>& ranks, size_t count, ReduceOp op) {
  std::vector<Values> all;
  std::vector<const void*> sources;
  for (const int rank : ranks) all.push_back(values_of(rank, count));
  for (const Values& values : all) sources.push_back(values.data());
  Values sum(count);
  const auto size = int(sources.size());
  reduce({DType::kFloat32, op, size}, sum.data(), sources.data(), size, count);
  return sum;
}

Values reduced(int size, size_t count, ReduceOp op) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return reduced(ranks, count, op);
}

bool same_bits(const Values& a, const Values& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

bool close_to(const Values& a, const Values& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::abs(a[i] - b[i]) > 4.0f * (1 << 14)) return false;  // the terms go up to 2^30
  }
  return true;
}

void check_allreduce(Ranks& ranks, Allreduce allreduce, size_t count, ReduceOp op, size_t segment_bytes) {
  const int size = ranks.size();
  const Call call = call_of(Kind::kAllreduce, count, op);
  std::vector<Values> results(size);
  ranks.run([&](Mesh& mesh) {
    Scratch scratch;
    const Values in = values_of(mesh.rank(), count);
    Values out(count), in_place = in;
    allreduce(mesh, call, in.data(), out.data(), reduction_of(call, size), scratch, segment_bytes);
    allreduce(mesh, call, in_place.data(), in_place.data(), reduction_of(call, size), scratch, segment_bytes);
    CHECK(same_bits(out, in_place) && same_bits(in, values_of(mesh.rank(), count)));
    results[mesh.rank()] = out;
  });
  const Values expected = reduced(size, count, op);
  CHECK(allreduce == allreduce_direct ? same_bits(results[0], expected) : close_to(results[0], expected));
  for (const Values& result : results) CHECK(same_bits(result, results[0]));
}

// 16-bit floats through direct are rounded once; integers are exact everywhere.
void check_allreduce_dtypes(Ranks& ranks) {
  const int size = ranks.size();
  ranks.run([&](Mesh& mesh) {
    Scratch scratch;
    std::vector<uint16_t> halves(501, static_cast<uint16_t>(0x3f80 + mesh.rank())), out(501);  // bfloat16 from 1 on
    std::vector<std::vector<uint16_t>> all;
    std::vector<const void*> sources;
    for (int rank = 0; rank < size; ++rank) all.emplace_back(501, static_cast<uint16_t>(0x3f80 + rank));
    for (const auto& values : all) sources.push_back(values.data());
    std::vector<uint16_t> expected(501);
    reduce({DType::kBfloat16, ReduceOp::kAverage, size}, expected.data(), sources.data(), size, 501);
    const Call call = call_of(Kind::kAllreduce, 501, ReduceOp::kAverage, DType::kBfloat16);
    allreduce_direct(mesh, call, halves.data(), out.data(), reduction_of(call, size), scratch, 64);
    CHECK(out == expected);

    for (const Allreduce allreduce : {Allreduce{allreduce_direct}, Allreduce{allreduce_ring}, Allreduce{doubling}}) {
      std::vector<int64_t> numbers(777);
      for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = int64_t(i) << 40 | mesh.rank();
      const Call sum = call_of(Kind::kAllreduce, 777, ReduceOp::kSum, DType::kInt64);
      allreduce(mesh, sum, numbers.data(), numbers.data(), reduction_of(sum, size), scratch, 100);
      for (size_t i = 0; i < numbers.size(); ++i) {
        CHECK(numbers[i] == (int64_t(i) << 40) * size + size * (size - 1) / 2);
      }
    }
  });
}

void check_reduce_to_root(Ranks& ranks, size_t count, size_t segment_bytes) {
  const Values expected = reduced(ranks.size(), count, ReduceOp::kAverage);
  for (int root = 0; root < ranks.size(); ++root) {
    ranks.run([&](Mesh& mesh) {
      Scratch scratch;
      const Values in = values_of(mesh.rank(), count);
      Values out(mesh.rank() == root ? count : 0), in_place = in;
      const Call call = call_of(Kind::kReduce, count, ReduceOp::kAverage);
      reduce_to_root(mesh, call, in.data(), out.data(), root, reduction_of(call, mesh.size()), scratch, segment_bytes);
      reduce_to_root(mesh, call, in_place.data(), in_place.data(), root, reduction_of(call, mesh.size()), scratch,
                     segment_bytes);
      CHECK(same_bits(in, values_of(mesh.rank(), count)));
      if (mesh.rank() == root) CHECK(same_bits(out, expected) && same_bits(in_place, expected));
    });
  }
}

// Uneven parts of `total`, some of them empty.
std::vector<size_t> uneven(size_t total, int parts, int shift) {
  std::vector<size_t> counts(parts, 0);
  size_t left = total;
  for (int i = 0; i < parts; ++i) {
    const int part = (i + shift) % parts;
    counts[part] = i + 1 == parts ? left : part % 3 == 1 ? 0 : left / 2;
    left -= counts[part];
  }
  return counts;
}

void check_reduce_scatterv(Ranks& ranks, size_t count, size_t segment_bytes) {
  const Values expected = reduced(ranks.size(), count, ReduceOp::kSum);
  const std::vector<size_t> counts = uneven(count, ranks.size(), 1);
  ranks.run([&](Mesh& mesh) {
    Scratch scratch;
    const size_t begin = std::accumulate(counts.begin(), counts.begin() + mesh.rank(), size_t{0});
    const size_t own = counts[mesh.rank()];
    Values in = values_of(mesh.rank(), count);
    Values out(own);
    const Values piece(expected.begin() + begin, expected.begin() + begin + own);
    const Call call = call_of(Kind::kReduceScatter, count);
    reduce_scatterv(mesh, call, in.data(), counts, out.data(), reduction_of(call, mesh.size()), scratch, segment_bytes);
    CHECK(same_bits(out, piece));
    reduce_scatterv(mesh, call, in.data(), counts, in.data() + begin, reduction_of(call, mesh.size()), scratch,
                    segment_bytes);
    CHECK(same_bits(Values(in.begin() + begin, in.begin() + begin + own), piece));
  });
}

using Bytes = std::vector<unsigned char>;

Bytes joined(const std::vector<size_t>& sizes) {
  Bytes all;
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    const Bytes block = pattern(sizes[rank], unsigned(rank));
    all.insert(all.end(), block.begin(), block.end());
  }
  return all;
}

void check_moving(Ranks& ranks, size_t total, size_t segment_bytes) {
  const int size = ranks.size();
  const std::vector<size_t> sizes = uneven(total, size, 2);
  const Bytes expected = joined(sizes);
  ranks.run([&](Mesh& mesh) {
    const int rank = mesh.rank();
    const size_t own = sizes[rank];
    const size_t begin = std::accumulate(sizes.begin(), sizes.begin() + rank, size_t{0});
    const Bytes in = pattern(own, rank);

    Bytes out(total);
    allgatherv(mesh, call_of(Kind::kAllgather, 0), in.data(), out.data(), sizes, segment_bytes);
    CHECK(out == expected);
    std::fill(out.begin(), out.end(), 0);
    std::copy(in.begin(), in.end(), out.begin() + begin);
    allgatherv(mesh, call_of(Kind::kAllgather, 0), out.data() + begin, out.data(), sizes, segment_bytes);
    CHECK(out == expected);

    for (int root = 0; root < size; ++root) {
      Bytes data = rank == root ? expected : Bytes(total);
      broadcast(mesh, call_of(Kind::kBroadcast, total), data.data(), total, root, segment_bytes);
      CHECK(data == expected);
      Bytes gathered(rank == root ? total : 0);
      gatherv(mesh, call_of(Kind::kGather, 0), in.data(), gathered.data(), sizes, root);
      if (rank == root) CHECK(gathered == expected);
      Bytes scattered(own);
      scatterv(mesh, call_of(Kind::kScatter, 0), gathered.data(), scattered.data(), sizes, root);
      CHECK(scattered == in);
    }
  });
}

void check_alltoallv(Ranks& ranks, size_t total) {
  const int size = ranks.size();
  ranks.run([&](Mesh& mesh) {
    const int rank = mesh.rank();
    const auto piece = [&](int from, int to) {
      return pattern(uneven(total, size, from)[to], unsigned(from * 50 + to));
    };
    Bytes in, expected;
    std::vector<size_t> in_sizes, out_sizes;
    for (int peer = 0; peer < size; ++peer) {
      const Bytes going = piece(rank, peer), coming = piece(peer, rank);
      in.insert(in.end(), going.begin(), going.end());
      expected.insert(expected.end(), coming.begin(), coming.end());
      in_sizes.push_back(going.size());
      out_sizes.push_back(coming.size());
    }
    Bytes out(expected.size());
    alltoallv(mesh, call_of(Kind::kAlltoall, 0), in.data(), in_sizes, out.data(), out_sizes);
    CHECK(out == expected);
  });
}

void check_barrier(Ranks& ranks) {
  std::atomic<int> arrived{0};
  ranks.run([&](Mesh& mesh) {
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      barrier(mesh, call_of(Kind::kBarrier, 0));
      CHECK(arrived >= round * mesh.size());
      barrier(mesh, call_of(Kind::kBarrier, 0));
    }
  });
}

void check_all(Wire wire, int streams) {
  for (const int size : kSizes) {
    Ranks ranks(size, wire, streams);
    for (const size_t count : kCounts) {
      for (const Allreduce allreduce : {Allreduce{allreduce_direct}, Allreduce{allreduce_ring}, Allreduce{doubling}}) {
        check_allreduce(ranks, allreduce, count, ReduceOp::kSum, kSegmentBytes);
        check_allreduce(ranks, allreduce, count, ReduceOp::kAverage, kManySegments);
      }
      check_moving(ranks, count, kSegmentBytes);
      check_moving(ranks, count, kManySegments);
      check_alltoallv(ranks, count);
      check_reduce_to_root(ranks, count, kManySegments);
      check_reduce_scatterv(ranks, count, kManySegments);
    }
    check_reduce_to_root(ranks, kMaxCount, kSegmentBytes);
    check_reduce_scatterv(ranks, kMaxCount, kSegmentBytes);
    check_allreduce_dtypes(ranks);
    check_barrier(ranks);
  }
}

// Two groups of one mesh work independently at the same time.
void check_groups() {
  constexpr size_t kCount = 10'007;
  Ranks ranks(5, Wire::kUnix);
  const std::vector<int> groups[] = {{0, 2, 3}, {1, 4}};
  ranks.run([&](Mesh& mesh) {
    const std::vector<int>& members = groups[mesh.rank() == 1 || mesh.rank() == 4];
    const Group group(mesh, members);
    const int size = int(members.size());
    CHECK(group.size() == size && members[group.rank()] == mesh.rank());
    Scratch scratch;
    const Values in = values_of(mesh.rank(), kCount);
    const Values expected = reduced(members, kCount, ReduceOp::kSum);
    Values out(kCount);
    const Call call = call_of(Kind::kAllreduce, kCount);
    const Reduction sum = reduction_of(call, size);
    allreduce_direct(group, call, in.data(), out.data(), sum, scratch, kManySegments);
    CHECK(same_bits(out, expected));
    allreduce_ring(group, call, in.data(), out.data(), sum, scratch, kManySegments);
    CHECK(close_to(out, expected));
    allreduce_doubling(group, call, in.data(), out.data(), sum, scratch);
    CHECK(close_to(out, expected));
    reduce_to_root(group, call, in.data(), out.data(), size - 1, sum, scratch);
    if (group.rank() == size - 1) CHECK(same_bits(out, expected));
    broadcast(group, call, out.data(), kCount * sizeof(float), size - 1);
    CHECK(same_bits(out, expected));
    Values all(kCount * size);
    allgatherv(group, call, in.data(), all.data(), std::vector<size_t>(size, kCount * sizeof(float)));
    for (int i = 0; i < size; ++i) {
      CHECK(same_bits(Values(all.begin() + i * kCount, all.begin() + (i + 1) * kCount), values_of(members[i], kCount)));
    }
    barrier(group, call);
  });
}

// Runs `body` on every rank; the first failure is announced to all others, as a communicator does.
template <class Body>
std::vector<std::string> failures_of(Ranks& ranks, Body&& body) {
  std::vector<std::string> texts(ranks.size());
  const auto tell_all = [&](FailureKind kind, int rank, const char* text) {
    for (int other = 0; other < ranks.size(); ++other) {
      ranks.failure(other).set(Failure(kind, rank, text));
      ranks.bell_handle(other).ring();
    }
  };
  ranks.run([&](Mesh& mesh) {
    const int rank = mesh.rank();
    try {
      body(mesh);
    } catch (const MismatchError& error) {
      texts[rank] = error.what();
      tell_all(FailureKind::kMismatch, rank, error.what());
    } catch (const Failure& error) {
      texts[rank] = error.what();
      tell_all(error.kind, error.rank, error.what());
    }
  });
  return texts;
}

void check_mismatch(Wire wire, size_t count, size_t other_count, ReduceOp other_op) {
  for (const Allreduce allreduce : {Allreduce{allreduce_direct}, Allreduce{allreduce_ring}, Allreduce{doubling}}) {
    Ranks ranks(4, wire);
    const auto texts = failures_of(ranks, [&](Mesh& mesh) {
      Scratch scratch;
      const bool odd_one = mesh.rank() == 2;
      const size_t own = odd_one ? other_count : count;
      Values data(own);
      const Call call = call_of(Kind::kAllreduce, own, odd_one ? other_op : ReduceOp::kSum);
      allreduce(mesh, call, data.data(), data.data(), reduction_of(call, 4), scratch, kManySegments);
    });
    for (const std::string& text : texts) {
      CHECK(contains(std::runtime_error(text), "rank 2 called") && contains(std::runtime_error(text), "but rank"));
    }
  }
}

// A rank leaves in the middle of a call: the failures of all others name it.
void check_lost_peer(Wire wire, int streams) {
  for (const Allreduce allreduce : {Allreduce{allreduce_direct}, Allreduce{allreduce_ring}, Allreduce{doubling}}) {
    Ranks ranks(4, wire, streams);
    const auto texts = failures_of(ranks, [&](Mesh& mesh) {
      Scratch scratch;
      Values data(3'000'000);
      const Call call = call_of(Kind::kAllreduce, data.size());
      if (mesh.rank() == 1) {
        // A part of the message, then the end.
        for (const int peer : {0, 2, 3}) {
          mesh.link(peer).send(call, data.data(), data.size());
          mesh.link(peer).progress();
        }
        ranks.leave(1);
        return;
      }
      allreduce(mesh, call, data.data(), data.data(), reduction_of(call, 4), scratch, data.size());
    });
    for (const int rank : {0, 2, 3}) CHECK(contains(std::runtime_error(texts[rank]), "rank 1"));
  }
}

void check_abort(Wire wire) {
  Ranks ranks(3, wire);
  const auto texts = failures_of(ranks, [&](Mesh& mesh) {
    if (mesh.rank() == 1) throw Failure(FailureKind::kAborted, 1, "rank 1 called abort()");
    Scratch scratch;
    Values data(1000);
    const Call call = call_of(Kind::kAllreduce, data.size());
    allreduce_direct(mesh, call, data.data(), data.data(), reduction_of(call, 3), scratch);
  });
  for (const std::string& text : texts) CHECK(text == "rank 1 called abort()");
}

// Between hosts with one rank each.
void check_choices() {
  constexpr size_t kKiB = 1024;
  CHECK(select_across({}, 64 * kKiB, 8) == Algorithm::kDoubling);
  CHECK(select_across({}, 64 * kKiB + 1, 8) == Algorithm::kDirect);
  CHECK(select_across({}, 17 * kKiB, 6) == Algorithm::kDirect);
  CHECK(select_across({}, 128 * kKiB, 64) == Algorithm::kDoubling);
  CHECK(select_across({}, 128 * kKiB + 1, 64) == Algorithm::kDirect);
  CHECK(select_across({}, 4096 * kKiB, 64) == Algorithm::kRing);
  // A size for the ring that is set holds for many ranks, too.
  SwitchOver over;
  over.ring_bytes = 80 * kKiB;
  for (const int ranks : {8, 64, 256}) CHECK(select_across(over, 80 * kKiB, ranks) == Algorithm::kRing);
  CHECK(select_across(over, 80 * kKiB - 1, 8) == Algorithm::kDirect);
  CHECK(select_across(over, 80 * kKiB - 1, 64) == Algorithm::kDoubling);
}

}  // namespace

int main() {
  check_choices();
  check_all(Wire::kUnix, 1);
  check_all(Wire::kTcp, 2);
  check_all(Wire::kShm, 1);
  check_groups();
  for (const Wire wire : {Wire::kUnix, Wire::kShm}) {
    check_mismatch(wire, 5000, 5001, ReduceOp::kSum);
    check_mismatch(wire, 5000, 0, ReduceOp::kSum);
    check_mismatch(wire, 0, 3, ReduceOp::kSum);
    check_mismatch(wire, 7, 7, ReduceOp::kMax);
    check_abort(wire);
  }
  check_lost_peer(Wire::kTcp, 1);
  check_lost_peer(Wire::kTcp, 2);
}
