// Collectives in shared memory among up to 64 ranks of one host, which are threads: with so many ranks, or little
// staging memory, lanes are smaller than the pieces that fewer ranks would use.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "host/host_group.h"
#include "host/host_segment.h"
#include "host_group_ranks.h"

namespace ronde {
namespace {

using testing::call_of;
using testing::memory_of;
using testing::run;

Call call_of_root(int root) {
  Call call = call_of(Kind::kScatter, 0);
  call.root = root;
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
  run(size, staging_bytes, [&](HostGroup& group, auto&) {
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
  run(size, staging_bytes, [&](HostGroup& group, auto&) {
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

// Buffers in symmetric memory, of each rank in another segment at another offset. Then nothing is staged.
class SymmetricBuffers {
 public:
  // `others_drop`: the other ranks have dropped the first of the segments.
  SymmetricBuffers(int size, size_t count, bool others_drop)
      : size_(static_cast<size_t>(size)), count_(count), others_drop_(others_drop) {
    for (auto& segment : segments_) segment = memory_of(size_ * part_bytes());
  }

  // Buffers of one rank, each with room for `size * count` elements.
  struct Buffers {
    float* in;
    float* out;
  };
  Buffers of(int rank, SymmetricSegments& symmetric) const {
    uint32_t numbers[2];
    for (size_t i = 0; i < 2; ++i) numbers[i] = symmetric.add(segments_[i], part_bytes(), rank);
    auto* part = reinterpret_cast<float*>(symmetric.own_part(numbers[rank == 0 ? 0 : 1])) + rank;
    if (others_drop_ && rank > 0) symmetric.drop(numbers[0]);
    return {part, part + size_ * count_};
  }

 private:
  size_t part_bytes() const { return (2 * size_ * count_ + size_) * sizeof(float); }

  size_t size_, count_;
  bool others_drop_;
  std::shared_ptr<Mapping> segments_[2];
};

bool sums_are_staged(int size, size_t count, bool others_drop, bool result_is_symmetric) {
  const SymmetricBuffers memory(size, count, others_drop);
  const std::vector<float> sums = sums_of(size, count);
  const Reduction sum{DType::kFloat32, ReduceOp::kSum, 1};
  return run(size, 4096, [&](HostGroup& group, SymmetricSegments& symmetric) {
    const auto [in, shared_out] = memory.of(group.index(), symmetric);
    std::vector<float> private_out(count);
    float* const out = result_is_symmetric ? shared_out : private_out.data();
    const std::vector<float> mine = values_of(group.index(), count);
    std::copy(mine.begin(), mine.end(), in);
    group.reduce(call_of(Kind::kReduce, count), sum, in, group.index() == 1 ? out : nullptr, count, 1);
    CHECK(group.index() != 1 || std::equal(sums.begin(), sums.end(), out));
    group.allreduce(call_of(Kind::kAllreduce, count), sum, in, out, count);
    CHECK(std::equal(sums.begin(), sums.end(), out) && std::equal(mine.begin(), mine.end(), in));
    group.allreduce(call_of(Kind::kAllreduce, count), sum, in, in, count);
    CHECK(std::equal(sums.begin(), sums.end(), in));
    const std::vector<size_t> nothing(static_cast<size_t>(size));
    group.reduce_scatter(call_of(Kind::kReduceScatter, 0), sum, in, nothing, out);
  });
}

bool moves_are_staged(int size, size_t count, bool others_drop) {
  const SymmetricBuffers memory(size, count, others_drop);
  return run(size, 4096, [&](HostGroup& group, SymmetricSegments& symmetric) {
    const auto ranks = static_cast<size_t>(size);
    const auto index = static_cast<size_t>(group.index());
    const float* const in = memory.of(group.index(), symmetric).in;
    const std::vector<float> given = values_of(group.index(), ranks * count);
    std::copy(given.begin(), given.end(), const_cast<float*>(in));
    std::vector<float> out(ranks * count);
    const auto check_block = [&](size_t block, int rank, size_t begin) {
      for (size_t i = 0; i < count; ++i) CHECK(out[block * count + i] == value_of(rank, begin + i));
    };
    const size_t bytes = count * sizeof(float);
    std::vector<size_t> sizes(ranks, bytes), offsets(ranks);
    std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), size_t{0});
    const int root = size - 1;
    group.share(call_of(Kind::kGather, 0), in, out.data(), {sizes, offsets}, root);
    for (int rank = 0; group.index() == root && rank < size; ++rank) check_block(static_cast<size_t>(rank), rank, 0);
    group.deal(call_of(Kind::kAlltoall, 0), in, {sizes, offsets}, out.data(), {sizes, offsets});
    for (int rank = 0; rank < size; ++rank) check_block(static_cast<size_t>(rank), rank, index * count);
    // A scatter from rank 0: the others have no input.
    const std::vector<size_t> nothing(ranks);
    std::vector<size_t> arriving(ranks);
    arriving[0] = bytes;
    const bool sends = group.index() == 0;
    group.deal(call_of(Kind::kScatter, 0), sends ? in : nullptr, {sends ? sizes : nothing, offsets}, out.data(),
               {arriving, nothing});
    check_block(0, 0, index * count);
  });
}

// Rank r sends rank p (r + 2 p) % 4 * step(r) bytes.
std::vector<size_t> sizes_of(int rank, int size, const std::function<size_t(int)>& step) {
  std::vector<size_t> sizes;
  for (int p = 0; p < size; ++p) sizes.push_back(static_cast<size_t>((rank + 2 * p) % 4) * step(rank));
  return sizes;
}

// All-to-all of ragged blocks and reduce-scatter of ragged counts, several times, so that both parities occur.
// `step(rank)`: the unit of the rank's blocks in bytes.
bool small_calls_are_staged(int size, const std::function<size_t(int)>& step, bool is_symmetric = false) {
  constexpr size_t kPartBytes = 1 << 20;
  const auto memory = memory_of(static_cast<size_t>(size) * kPartBytes);
  return run(size, 4096, [&](HostGroup& group, SymmetricSegments& symmetric) {
    const int index = group.index();
    const auto byte_of = [](int from, int to, size_t i) { return static_cast<unsigned char>(i * 7 + from * 31 + to); };
    const std::vector<size_t> sending = sizes_of(index, size, step);
    std::vector<size_t> arriving, from(sending.size()), to(sending.size());
    for (int p = 0; p < size; ++p) arriving.push_back(sizes_of(p, size, step)[static_cast<size_t>(index)]);
    std::exclusive_scan(sending.begin(), sending.end(), from.begin(), size_t{0});
    std::exclusive_scan(arriving.begin(), arriving.end(), to.begin(), size_t{0});
    std::vector<unsigned char> private_in(from.back() + sending.back());
    auto* const in =
        is_symmetric ? reinterpret_cast<unsigned char*>(symmetric.own_part(symmetric.add(memory, kPartBytes, index)))
                     : private_in.data();
    CHECK(private_in.size() <= kPartBytes);
    for (int p = 0; p < size; ++p) {
      const auto place = static_cast<size_t>(p);
      for (size_t i = 0; i < sending[place]; ++i) in[from[place] + i] = byte_of(index, p, i);
    }
    for (int repeat = 0; repeat < 3; ++repeat) {
      std::vector<unsigned char> out(to.back() + arriving.back());
      group.deal(call_of(Kind::kAlltoall, 0), in, {sending, from}, out.data(), {arriving, to});
      for (int p = 0; p < size; ++p) {
        const auto place = static_cast<size_t>(p);
        for (size_t i = 0; i < arriving[place]; ++i) CHECK(out[to[place] + i] == byte_of(p, index, i));
      }
      std::vector<size_t> counts;
      for (int p = 0; p < size; ++p) counts.push_back(static_cast<size_t>(p * 3 % 5));
      const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
      const size_t begin = std::accumulate(counts.begin(), counts.begin() + index, size_t{0});
      std::vector<float> values = values_of(index, total);
      const std::vector<float> sums = sums_of(size, total);
      float* const share = values.data() + begin;  // in place
      group.reduce_scatter(call_of(Kind::kReduceScatter, total), {DType::kFloat32, ReduceOp::kSum, 1}, values.data(),
                           counts, share);
      CHECK(
          std::equal(share, share + counts[static_cast<size_t>(index)], sums.begin() + static_cast<ptrdiff_t>(begin)));
    }
  });
}

void test_small_calls() {
  for (const int size : {1, 2, 3, 5, 64}) {
    const size_t room = kSmallBytes / static_cast<size_t>(std::max(size - 1, 1)) / 3;
    for (const size_t step : {size_t{0}, size_t{1}, size_t{16}, room}) {
      CHECK(!small_calls_are_staged(size, [&](int) { return step; }));
    }
  }
  // Some ranks have blocks that travel in their announcements, others larger ones.
  const auto mixed = [](int rank) { return rank % 2 == 0 ? size_t{2} : size_t{5'000}; };
  for (const int size : {2, 3, 5, 20}) {
    CHECK(small_calls_are_staged(size, mixed));
    CHECK(!small_calls_are_staged(size, mixed, true));
  }
}

// The rows that rank `from` has for rank `to`, the bytes of which are all the same.
uint64_t told_rows(int from, int to, int repeat) { return static_cast<uint64_t>((from + 2 * to + repeat) % 3); }

std::vector<std::byte> told_block(int from, int to, int repeat, size_t row_bytes) {
  return std::vector(told_rows(from, to, repeat) * row_bytes, static_cast<std::byte>(from * 31 + to + 1));
}

// Blocks one behind the other.
struct Blocks {
  std::vector<std::byte> bytes;
  std::vector<uint64_t> rows;
  std::vector<size_t> sizes, offsets;

  Blocks(int size, int repeat, size_t row_bytes, const std::function<std::pair<int, int>(int)>& ends) {
    for (int p = 0; p < size; ++p) {
      const auto [from, to] = ends(p);
      const std::vector<std::byte> block = told_block(from, to, repeat, row_bytes);
      rows.push_back(told_rows(from, to, repeat));
      sizes.push_back(block.size());
      offsets.push_back(bytes.size());
      bytes.insert(bytes.end(), block.begin(), block.end());
    }
  }
  Parts parts() const { return {sizes, offsets}; }
};

// These return whether the blocks have come along with the sizes.
bool tells_splits(HostGroup& group, int repeat, size_t row_bytes) {
  const Call call = call_of(Kind::kAlltoall, 0);
  const Blocks mine(group.size(), repeat, row_bytes, [&](int p) { return std::pair(group.index(), p); });
  const Blocks others(group.size(), repeat, row_bytes, [&](int p) { return std::pair(p, group.index()); });
  std::vector<uint64_t> arriving(others.rows.size());
  group.tell_splits(call, mine.bytes.data(), mine.rows, row_bytes, arriving);
  CHECK(arriving == others.rows);
  const bool are_carried = group.are_carried();
  std::vector<std::byte> got(others.bytes.size());
  if (are_carried) {
    group.take_splits(mine.bytes.data(), mine.parts(), got.data(), others.parts());
  } else {
    group.deal(call, mine.bytes.data(), mine.parts(), got.data(), others.parts());
  }
  CHECK(got == others.bytes);
  return are_carried;
}

bool tells_rows(HostGroup& group, int repeat, size_t row_bytes, int root) {
  const Call call = call_of(Kind::kGather, 0);
  const Blocks all(group.size(), repeat, row_bytes, [](int p) { return std::pair(p, p); });
  const auto index = static_cast<size_t>(group.index());
  const std::byte* const own = all.bytes.data() + all.offsets[index];
  std::vector<uint64_t> rows(all.rows.size());
  group.tell_rows(call, own, all.rows[index], row_bytes, rows);
  CHECK(rows == all.rows);
  const bool are_carried = group.are_carried();
  std::vector<std::byte> got(all.bytes.size());
  if (are_carried) {
    group.take_rows(own, got.data(), all.parts(), root);
  } else {
    group.share(call, own, got.data(), all.parts(), root);
  }
  if (root < 0 || root == group.index()) CHECK(got == all.bytes);
  return are_carried;
}

bool tells_words(HostGroup& group, int repeat, size_t row_bytes, int root) {
  const Call call = call_of_root(root);
  const bool is_root = group.index() == root;
  const Blocks all(group.size(), repeat, row_bytes, [&](int p) { return std::pair(root, p); });
  const std::vector<int64_t> told(all.rows.begin(), all.rows.end());
  std::vector<int64_t> words = is_root ? told : std::vector<int64_t>();
  const std::byte* const in = is_root ? all.bytes.data() : nullptr;
  group.tell_words(call, words, in, all.sizes);
  CHECK(words == told);
  if (!group.are_carried()) return false;
  const std::vector<std::byte> expected = told_block(root, group.index(), repeat, row_bytes);
  std::vector<std::byte> got(expected.size());
  group.take_block(root, in, all.sizes, got.data());
  CHECK(got == expected);
  return true;
}

// Ragged rows whose numbers only some ranks know, several times, so that both parities occur.
bool told_blocks_are_carried(int size, size_t row_bytes) {
  std::atomic<bool> are_carried{true};
  run(size, 4096, [&](HostGroup& group, auto&) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      const int root = (size - 1 + repeat) % size;
      if (!tells_splits(group, repeat, row_bytes)) are_carried = false;
      if (!tells_rows(group, repeat, row_bytes, root)) are_carried = false;
      if (!tells_rows(group, repeat, row_bytes, -1)) are_carried = false;
      if (!tells_words(group, repeat, row_bytes, root)) are_carried = false;
    }
  });
  return are_carried;
}

void test_told() {
  for (const int size : {1, 2, 3, 5, 64}) {
    const size_t room = (kSmallBytes - static_cast<size_t>(size) * 16) / static_cast<size_t>(std::max(2 * size, 1));
    for (const size_t row_bytes : {size_t{0}, size_t{1}, size_t{8}, room})
      CHECK(told_blocks_are_carried(size, row_bytes));
    CHECK(!told_blocks_are_carried(size, kSmallBytes + 1) || size == 1);
  }
}

// What rank 0 has told does not fit into a message: rank 1 neither reads beyond it nor takes the blocks for carried.
void test_untrue_sizes() {
  const std::vector<int64_t> many_words(100, 1);
  const std::vector<std::byte> mine(16), others(2 * kSmallBytes);
  std::vector<std::byte> got(others.size());
  run(2, 4096, [&](HostGroup& group, auto&) {
    const bool is_honest = group.index() == 1;
    const auto check_refused = [&](const std::function<void()>& body) {
      if (is_honest) CHECK_THROWS(body(), ProtocolError);
    };
    // Of so many rows the bytes are 0 modulo 2^64.
    std::vector<uint64_t> rows(2);
    group.tell_rows(call_of(Kind::kAllgather, 0), nullptr, is_honest ? 0 : uint64_t{1} << 61, 8, rows);
    CHECK(rows[0] == uint64_t{1} << 61 && !group.are_carried());

    for (const size_t count : {size_t{0}, size_t{1}, many_words.size()}) {
      std::vector<int64_t> words(many_words.begin(), many_words.begin() + static_cast<ptrdiff_t>(count));
      const std::vector<size_t> nothing(2);
      const auto tell = [&] { group.tell_words(call_of_root(0), words, nullptr, nothing); };
      is_honest ? check_refused(tell) : tell();
    }

    std::vector<int64_t> words = {0, 1};
    const std::vector<size_t> small(2, 8), large(2, kSmallBytes - 16), wrapping(2, SIZE_MAX - 8);
    group.tell_words(call_of_root(0), words, mine.data(), small);
    check_refused([&] { group.take_block(0, nullptr, large, got.data()); });
    check_refused([&] { group.take_block(0, nullptr, wrapping, got.data()); });

    std::vector<uint64_t> arriving(2);
    const std::vector<size_t> offsets(2);
    group.tell_splits(call_of(Kind::kAlltoall, 0), mine.data(), std::vector<uint64_t>{1, 1}, 8, arriving);
    const std::vector<size_t> from_0 = {large[0], 0};
    check_refused([&] { group.take_splits(mine.data(), {small, offsets}, got.data(), {from_0, offsets}); });
    group.announce(call_of(Kind::kBarrier, 0));
  });
}

// A segment that is older than the 64 newest, of which all ranks pass the same place.
void test_old_segment() {
  constexpr size_t kCount = 5'000;
  const auto memory = memory_of(2 * kCount * sizeof(float)), other = memory_of(2 * 4096);
  CHECK(!run(2, 4096, [&](HostGroup& group, SymmetricSegments& symmetric) {
    auto* x =
        reinterpret_cast<float*>(symmetric.own_part(symmetric.add(memory, kCount * sizeof(float), group.index())));
    for (int i = 0; i < 70; ++i) symmetric.add(other, 4096, group.index());
    const std::vector<float> mine = values_of(group.index(), kCount), sums = sums_of(2, kCount);
    std::copy(mine.begin(), mine.end(), x);
    group.allreduce(call_of(Kind::kAllreduce, kCount), {DType::kFloat32, ReduceOp::kSum, 1}, x, x, kCount);
    CHECK(std::equal(sums.begin(), sums.end(), x));
  }));
}

void test_symmetric_memory() {
  for (const int size : {2, 3, 5}) {
    CHECK(!sums_are_staged(size, 20'000, false, true));
    CHECK(sums_are_staged(size, 20'000, false, false));  // the results alone
    CHECK(sums_are_staged(size, 20'000, true, true));
    CHECK(!moves_are_staged(size, 3'000, false));
    CHECK(moves_are_staged(size, 3'000, true));
  }
}

// An array that is dropped in the middle of a call stays mapped until its end, but no new call uses it.
void test_pins() {
  SymmetricSegments symmetric;
  const uint32_t first = symmetric.add(memory_of(4096), 4096, 0);
  const uint32_t second = symmetric.add(memory_of(4096), 4096, 0);
  std::byte* const data = symmetric.own_part(first);
  const Place place = symmetric.place_of(data + 96, 4000);
  CHECK(place.segment == first && symmetric.live().has(first) && symmetric.live().has(second));
  CHECK(symmetric.resolve(place, 0, 4000) == data + 96);
  CHECK_THROWS(symmetric.resolve(place, 0, 4001), std::out_of_range);
  {
    const SymmetricSegments::Pin pin(symmetric);
    symmetric.drop(first);
    CHECK(!symmetric.live().has(first) && symmetric.live().has(second));
    CHECK(symmetric.place_of(data, 1).segment == 0);
    CHECK(symmetric.resolve(place, 0, 4000) == data + 96);
  }
  CHECK_THROWS(symmetric.resolve(place, 0, 1), std::logic_error);
  for (int i = 0; i < 64; ++i) symmetric.add(memory_of(4096), 4096, 0);
  CHECK(symmetric.live().has(second + 1) && symmetric.live().has(second + 64));  // the 64 newest
  CHECK(!symmetric.live().has(second) && !symmetric.live().has(second + 65) && !symmetric.live().has(0));
}

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_pins();
  ronde::test_symmetric_memory();
  ronde::test_old_segment();
  ronde::test_small_calls();
  ronde::test_told();
  ronde::test_untrue_sizes();
  for (const int size : {2, 3, 43, 48, 64}) ronde::test_sums(size, 256 * 1024, 200'000);
  for (const size_t staging_bytes : {1, 4096, 8192}) ronde::test_sums(3, staging_bytes, 50'000);
  ronde::test_moves(64, 256 * 1024, 3'000);
  ronde::test_moves(3, 1, 20'000);
  return 0;
}
