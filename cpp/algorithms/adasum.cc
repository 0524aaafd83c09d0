// Adasum by recursive vector halving and distance doubling, then back.
//
// *Down*, at distance 1, 2, 4, ...: rank and partner (rank ^ distance) hold the same range of two vectors, a of the
// lower rank's block of ranks and b of the upper rank's block. They halve the range and exchange halves, so that each
// holds one half of both vectors. The block of 2 distance ranks now holds all pieces of a and b: its ranks form the dot
// products of their pieces and sum them by recursive doubling. Then each rank combines its half, which is its range of
// the block's vector. *Up*, at distance ..., 2, 1: the partners exchange their combined ranges.
//
// Every rank sends and receives 2 (ranks - 1) / ranks times the buffer, as in an all-reduce. A rank adds each arriving
// segment to the products while the segment is in the cache.
//
// In a hierarchy the ranks of a rail (hierarchical.h) do this with a shard. The ranks of each host also sum the
// products over its rails, because only the shards of all rails together make whole vectors.
//
// In one host every rank takes its share of the elements of all vectors up the whole tree. At every level it sums the
// products with the other ranks, and at the end all ranks get all shares. In symmetric memory that needs no messages:
// the ranks read each other's buffers and write the result to all of them. Elsewhere deal() distributes the shares and
// share() collects them.
//
// Small buffers: every rank gathers all vectors, which takes one step, and climbs the tree alone. All ranks compute the
// same, and all versions of the kernels give the same bits.
#include "algorithms/adasum.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "algorithms/adasum_vectors.h"
#include "algorithms/chunks.h"
#include "algorithms/over_links.h"
#include "base/function_ref.h"

namespace ronde {
namespace {

// Of all ranks together. An all-gather of up to this size takes one step (allgatherv.cc).
constexpr size_t kGatherBytes = 64 << 10;

constexpr size_t kAlignmentElements = 64;

// Sums products over the ranks that hold other pieces of the same vectors.
using SumProducts = FunctionRef<void(std::span<double>)>;

// --- Everything on every rank ---------------------------------------------------------------------------------------

// `gathered` holds the whole buffers of `ranks` ranks, one behind the other. The function overwrites it.
void combine_gathered(const Call& call, std::byte* gathered, int ranks, void* out, std::span<const size_t> counts) {
  const Vectors vectors(call.dtype, counts);
  const Range all{0, call.count};
  const size_t bytes = call.count * size_of(call.dtype);
  for (int distance = 1; distance < ranks; distance *= 2) {
    for (int rank = 0; rank < ranks; rank += 2 * distance) {
      std::byte* const a = gathered + static_cast<size_t>(rank) * bytes;
      const std::byte* const b = a + static_cast<size_t>(distance) * bytes;
      const auto form = [&](std::span<const int> exponents) {
        std::vector<double> products = vectors.no_products();
        vectors.add_products(a, b, all, products, exponents);
        return products;
      };
      const ScaledSums sums(call.dtype, form({}), form);
      vectors.combine(a, a, b, all, sums.all());
    }
  }
  if (bytes > 0) std::memcpy(out, gathered, bytes);
}

// --- Halving and doubling -------------------------------------------------------------------------------------------

class Halving {
 public:
  // `range`: the part of the buffer that this group of ranks combines.
  Halving(const Group& group, const Call& call, const void* in, void* out, const Range& range, const Vectors& vectors,
          Scratch& scratch, SumProducts sum_elsewhere)
      : group_(group),
        call_(call),
        mine_(static_cast<const std::byte*>(in)),
        out_(static_cast<std::byte*>(out)),
        vectors_(vectors),
        sum_elsewhere_(sum_elsewhere),
        rank_(group.rank()),
        element_bytes_(size_of(call.dtype)),
        held_(range),
        received_(scratch.get(bytes(upper_half(range)))) {}

  void run() {
    for (int distance = 1; distance < group_.size(); distance *= 2) go_down(distance);
    if (mine_ != out_ && held_.count > 0) {
      std::memcpy(out_ + offset(held_), mine_ + offset(held_), bytes(held_));  // a group of one rank
    }
    for (int distance = group_.size() / 2; distance > 0; distance /= 2) go_up(distance);
  }

 private:
  // Cuts at a multiple of kAlignmentElements if the half has that many elements. The upper half is the longer one.
  static Range lower_half(const Range& range) {
    const size_t half = range.count / 2;
    return {range.begin, half < kAlignmentElements ? half : half / kAlignmentElements * kAlignmentElements};
  }
  static Range upper_half(const Range& range) {
    const Range lower = lower_half(range);
    return {range.begin + lower.count, range.count - lower.count};
  }
  size_t bytes(const Range& range) const { return range.count * element_bytes_; }
  size_t offset(const Range& range) const { return range.begin * element_bytes_; }

  // Both partners cut alike. An empty range is one segment, too, so that the receiver compares the calls.
  std::vector<Range> segments(const Range& range) const {
    const size_t most = kSegmentBytes / element_bytes_;
    std::vector<Range> all;
    for (size_t begin = 0; all.empty() || begin < range.count; begin += most) {
      all.push_back({range.begin + begin, std::min(most, range.count - begin)});
    }
    return all;
  }

  void go_down(int distance) {
    const int partner = rank_ ^ distance;
    const bool is_lower = rank_ < partner;
    const Range keep = is_lower ? lower_half(held_) : upper_half(held_);
    const Range give = is_lower ? upper_half(held_) : lower_half(held_);
    const std::byte* const own = mine_ + offset(keep);
    const std::byte* const a = is_lower ? own : received_;
    const std::byte* const b = is_lower ? received_ : own;

    Transfer last_send;
    for (const Range& range : segments(give)) {
      last_send = group_.send(partner, call_, mine_ + offset(range), bytes(range));
    }
    const std::vector<Range> coming = segments(keep);
    std::vector<Transfer> arrivals;
    for (const Range& range : coming) {
      arrivals.push_back(group_.recv(partner, call_, received_ + offset(range) - offset(keep), bytes(range)));
    }
    std::vector<double> products = vectors_.no_products();
    for (size_t i = 0; i < coming.size(); ++i) {
      group_.wait(arrivals[i]);
      const size_t begin = offset(coming[i]) - offset(keep);
      vectors_.add_products(a + begin, b + begin, coming[i], products);
    }
    group_.wait(last_send);
    sum_in_block(products, distance);
    sum_elsewhere_(products);
    const ScaledSums sums(call_.dtype, std::move(products), [&](std::span<const int> exponents) {
      std::vector<double> again = vectors_.no_products();
      vectors_.add_products(a, b, keep, again, exponents);
      sum_in_block(again, distance);
      sum_elsewhere_(again);
      return again;
    });
    vectors_.combine(out_ + offset(keep), a, b, keep, sums.all());
    given_.push_back(give);
    held_ = keep;
    mine_ = out_;
  }

  // Both partners add the same two numbers, so all ranks of the block get the same bits.
  void sum_in_block(std::span<double> products, int distance) {
    std::vector<double> theirs(products.size());
    for (int step = 1; step <= distance; step *= 2) {
      const int peer = rank_ ^ step;
      const Transfer transfers[] = {group_.send(peer, call_, products.data(), products.size_bytes()),
                                    group_.recv(peer, call_, theirs.data(), products.size_bytes())};
      group_.wait(transfers);
      for (size_t i = 0; i < products.size(); ++i) products[i] += theirs[i];
    }
  }

  void go_up(int distance) {
    const int partner = rank_ ^ distance;
    const Range theirs = given_.back();
    given_.pop_back();
    const Transfer transfers[] = {group_.send(partner, call_, out_ + offset(held_), bytes(held_)),
                                  group_.recv(partner, call_, out_ + offset(theirs), bytes(theirs))};
    group_.wait(transfers);
    held_ = {std::min(held_.begin, theirs.begin), held_.count + theirs.count};
  }

  const Group& group_;
  const Call& call_;
  const std::byte* mine_;  // the vectors that this rank's block has combined: first the input, then out_
  std::byte* const out_;
  const Vectors& vectors_;
  const SumProducts sum_elsewhere_;
  const int rank_;
  const size_t element_bytes_;
  Range held_;
  std::vector<Range> given_;  // by level of the tree
  std::byte* const received_;
};

void adasum_halving(const Group& group, const Call& call, const void* in, void* out, std::span<const size_t> counts,
                    Scratch& scratch) {
  const Vectors vectors(call.dtype, counts);
  Halving(group, call, in, out, {0, call.count}, vectors, scratch, [](std::span<double>) {}).run();
}

// --- In one host ----------------------------------------------------------------------------------------------------

void sum_products(HostGroup& host, const Call& call, std::span<double> products) {
  const Reduction sum{DType::kFloat64, ReduceOp::kSum, 1};
  host.allreduce(call, sum, products.data(), products.data(), products.size());
}

// The elements that each rank combines, by local rank: multiples of kAlignmentElements.
std::vector<Range> shares_of(const Call& call, int ranks) {
  const auto parts = static_cast<size_t>(ranks);
  const size_t lines = (call.count + kAlignmentElements - 1) / kAlignmentElements;
  std::vector<Range> shares;
  for (size_t rank = 0; rank < parts; ++rank) {
    const size_t begin = std::min(lines * rank / parts * kAlignmentElements, call.count);
    shares.push_back({begin, std::min(lines * (rank + 1) / parts * kAlignmentElements, call.count) - begin});
  }
  return shares;
}

// Combines one share of all ranks' vectors along the tree and writes the result to `result`. `between` has room for
// half of the pieces. It may be the memory in which the pieces lie one behind the other.
void combine_share(HostGroup& host, const Call& call, std::span<const size_t> counts, const Range& share,
                   std::vector<const std::byte*> pieces, std::byte* between, std::byte* result) {
  const Vectors vectors(call.dtype, counts);
  const size_t each = vectors.no_products().size();
  const size_t bytes = share.count * size_of(call.dtype);
  while (pieces.size() > 1) {
    const size_t pairs = pieces.size() / 2;
    const auto form = [&](std::span<const int> exponents) {
      std::vector<double> products(pairs * each);
      for (size_t pair = 0; pair < pairs; ++pair) {
        const auto own = exponents.empty() ? exponents : exponents.subspan(2 * counts.size() * pair, 2 * counts.size());
        vectors.add_products(pieces[2 * pair], pieces[2 * pair + 1], share,
                             std::span(products).subspan(pair * each, each), own);
      }
      sum_products(host, call, products);
      return products;
    };
    const ScaledSums sums(call.dtype, form({}), form);
    for (size_t pair = 0; pair < pairs; ++pair) {
      std::byte* const to = pairs == 1 ? result : between + pair * bytes;
      const Sums own = sums.of(pair * counts.size(), counts.size());
      vectors.combine(to, pieces[2 * pair], pieces[2 * pair + 1], share, own);
      pieces[pair] = to;
    }
    pieces.resize(pairs);
  }
  if (pieces[0] != result && bytes > 0) std::memcpy(result, pieces[0], bytes);  // a host of one rank
}

void adasum_symmetric(HostGroup& host, const Call& call, const HostGroup::Buffers& buffers,
                      std::span<const size_t> counts, Scratch& scratch) {
  const auto ranks = static_cast<size_t>(host.size()), index = static_cast<size_t>(host.index());
  const Range share = shares_of(call, host.size())[index];
  const size_t offset = share.begin * size_of(call.dtype), bytes = share.count * size_of(call.dtype);
  std::vector<const std::byte*> pieces;
  for (const std::byte* in : buffers.in) pieces.push_back(in + offset);
  std::byte* const result = buffers.out[index] + offset;
  combine_share(host, call, counts, share, std::move(pieces), scratch.get(ranks / 2 * bytes), result);
  for (std::byte* const out : buffers.out) {
    if (out + offset == result) continue;
    host.write_in_pieces(bytes, 1, [&](size_t begin, size_t piece_bytes) {
      std::memcpy(out + offset + begin, result + begin, piece_bytes);
    });
  }
  host.release_buffers();
}

void adasum_dealt(HostGroup& host, const Call& call, const void* in, void* out, std::span<const size_t> counts,
                  Scratch& scratch) {
  const auto ranks = static_cast<size_t>(host.size()), index = static_cast<size_t>(host.index());
  const std::vector<Range> shares = shares_of(call, host.size());
  std::vector<size_t> sizes, offsets;
  for (const Range& share : shares) {
    sizes.push_back(share.count * size_of(call.dtype));
    offsets.push_back(share.begin * size_of(call.dtype));
  }
  std::byte* const dealt = scratch.get(ranks * sizes[index]);
  std::vector<const std::byte*> pieces;
  std::vector<size_t> places;
  for (size_t rank = 0; rank < ranks; ++rank) {
    places.push_back(rank * sizes[index]);
    pieces.push_back(dealt + places.back());
  }
  host.deal(call, in, {sizes, offsets}, dealt, {std::vector<size_t>(ranks, sizes[index]), places});
  std::byte* const result = static_cast<std::byte*>(out) + offsets[index];
  combine_share(host, call, counts, shares[index], std::move(pieces), dealt, result);
  host.share(call, result, out, {sizes, offsets});
}

bool gathers(const Call& call, int ranks) {
  return call.count * size_of(call.dtype) <= kGatherBytes / static_cast<size_t>(ranks);
}

}  // namespace

void adasum(const Group& group, const Call& call, const void* in, void* out, std::span<const size_t> counts,
            Scratch& scratch) {
  if (!gathers(call, group.size())) return adasum_halving(group, call, in, out, counts, scratch);
  const std::vector<size_t> sizes(static_cast<size_t>(group.size()), call.count * size_of(call.dtype));
  std::byte* const gathered = scratch.get(sizes.size() * sizes.front());
  allgatherv(group, call, in, gathered, sizes);
  combine_gathered(call, gathered, group.size(), out, counts);
}

void adasum_in_host(HostGroup& host, const Call& call, const void* in, void* out, std::span<const size_t> counts,
                    Scratch& scratch) {
  const size_t bytes = call.count * size_of(call.dtype);
  const auto ranks = static_cast<size_t>(host.size());
  if (!gathers(call, host.size())) {
    const HostGroup::Buffers buffers = host.announce(call, in, out, bytes);
    if (!buffers.in.empty()) return adasum_symmetric(host, call, buffers, counts, scratch);
    return adasum_dealt(host, call, in, out, counts, scratch);
  }
  std::vector<size_t> sizes(ranks, bytes), offsets(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) offsets[rank] = rank * bytes;
  std::byte* const gathered = scratch.get(ranks * bytes);
  host.share(call, in, gathered, {sizes, offsets});
  combine_gathered(call, gathered, host.size(), out, counts);
}

void hierarchical_adasum(Hierarchy& hierarchy, const Call& call, const void* in, void* out,
                         std::span<const size_t> counts) {
  HostGroup& host = hierarchy.host;
  const Reduction average{call.dtype, ReduceOp::kAverage, host.size()};
  if (call.count * size_of(call.dtype) <= kSmallBytes && is_homogeneous(hierarchy)) {
    host.allreduce(call, average, in, out, call.count);
    const std::vector<int> members = rail(hierarchy, host.index());
    return adasum(Group(hierarchy.mesh, members), call, out, out, counts, hierarchy.scratch);
  }

  const Shards shards = shards_of(hierarchy, size_of(call.dtype), call.count);
  const auto index = static_cast<size_t>(host.index());
  std::byte* const shard = static_cast<std::byte*>(out) + shards.offsets[index];
  host.reduce_scatter(call, average, in, shards.counts, shard);
  const Vectors vectors(call.dtype, counts);
  const auto sum_in_host = [&](std::span<double> products) { sum_products(host, call, products); };
  if (is_on_rail(hierarchy)) {
    const std::vector<int> members = rail(hierarchy, host.index());
    const Range range{shards.offsets[index] / size_of(call.dtype), shards.counts[index]};
    Halving(Group(hierarchy.mesh, members), call, out, out, range, vectors, hierarchy.scratch, sum_in_host).run();
  } else {
    // This rank has no shard, but it takes part in the host's sum of products at every level.
    for (size_t hosts = hierarchy.ranks_of_host.size(); hosts > 1; hosts /= 2) {
      const auto add_nothing = [&](std::span<const int>) {
        std::vector<double> nothing = vectors.no_products();
        sum_in_host(nothing);
        return nothing;
      };
      ScaledSums(call.dtype, add_nothing({}), add_nothing);
    }
  }
  host.share(call, shard, out, {shards.sizes, shards.offsets});
}

}  // namespace ronde
