// Hierarchical all-reduce: reduce-scatter inside each host, all-reduce of each shard across the hosts, all-gather
// inside each host.
//
// Ranks with the same local index form a *rail*. Each rail carries its own shard between the hosts, so that all rails
// together move every byte across once per direction and every core has a share of the work. If hosts have different
// numbers of ranks, there are as many rails as the smallest host has ranks.
//
// Small messages save two of the three steps, unless a host has very many ranks: every rank sums its whole host (one
// exchange in shared memory) and then the whole message along its rail.
//
// A reduction to a root takes the same steps, but sends the shards to the ranks of the root's host, and from them to
// the root. Small reductions, and a broadcast, take one *leader* per host: the root on its own host, the first rank
// elsewhere.
//
// A reduce-scatter between hosts with equally many ranks gives each rank the partial sums of its host that the ranks of
// its rail need, one piece for each host, and the ranks of a rail exchange these. So each sum crosses between two hosts
// once, and not once for each rank of the sending host.
//
// The hosts exchange partial sums. Partial sums of 16-bit floats travel as float32 to the rank that completes and
// rounds them: 6 bytes per element and direction instead of 4.
//
// Source of the idea: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
// IJHPCA 19(1), 2005, section 5 (clusters of SMPs), with all ranks instead of one per host on the wire.
#include "algorithms/hierarchical.h"

#include <algorithm>
#include <numeric>

#include "algorithms/hierarchical_pieces.h"
#include "algorithms/over_links.h"
#include "algorithms/select.h"

namespace ronde {
namespace {

constexpr size_t kWholeBytes = 16 << 10;  // what the rails of a host may send where each carries the whole message

// One rank per host, by host number. The root is the leader of its host.
std::vector<int> leaders(const Hierarchy& hierarchy, int root) {
  std::vector<int> members;
  for (const auto& ranks : hierarchy.ranks_of_host) {
    const bool has_root = std::find(ranks.begin(), ranks.end(), root) != ranks.end();
    members.push_back(has_root ? root : ranks.front());
  }
  return members;
}

// `count` elements, of the whole buffer or of a shard. `in` is `out` unless the types differ.
void allreduce_across(Hierarchy& hierarchy, Call call, const std::vector<int>& members, const void* in, void* out,
                      size_t count) {
  const Algorithm algorithm = algorithm_across(hierarchy, call, count * static_cast<size_t>(rail_count(hierarchy)));
  call.count = count;
  const Group group(hierarchy.mesh, members);
  const Reduction across = across_hosts(hierarchy, call);
  if (algorithm == Algorithm::kDirect) {
    allreduce_direct(group, call, in, out, across, hierarchy.scratch);
  } else if (algorithm == Algorithm::kRing) {
    allreduce_ring(group, call, in, out, across, hierarchy.scratch);
  } else {
    allreduce_doubling(group, call, in, out, across, hierarchy.scratch);
  }
}

// For small messages: each leader gets the sum of its host, and the root the sum of the leaders.
void reduce_by_leaders(Hierarchy& hierarchy, const Call& call, const void* in, void* out) {
  const std::vector<int> members = leaders(hierarchy, call.root);
  const std::vector<int>& mine = hierarchy.ranks_of_host[hierarchy.my_host];
  const int leader = members[hierarchy.my_host];
  const Reduction across = across_hosts(hierarchy, call);
  std::byte* const sum = hierarchy.partials.get(call.count * across.item_bytes());
  hierarchy.host.reduce(call, inside_host(call), in, sum, call.count, position(mine, leader));
  if (leader != hierarchy.mesh.rank()) return;
  reduce_to_root(Group(hierarchy.mesh, members), call, sum, out, position(members, call.root), across,
                 hierarchy.scratch);
}

}  // namespace

int position(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

int host_of(const Hierarchy& hierarchy, int rank) {
  int host = 0;
  while (std::ranges::find(hierarchy.ranks_of_host[host], rank) == hierarchy.ranks_of_host[host].end()) ++host;
  return host;
}

int rail_count(const Hierarchy& hierarchy) {
  size_t smallest = SIZE_MAX;
  for (const auto& ranks : hierarchy.ranks_of_host) smallest = std::min(smallest, ranks.size());
  return static_cast<int>(smallest);
}

bool is_homogeneous(const Hierarchy& hierarchy) {
  const size_t first = hierarchy.ranks_of_host.front().size();
  return std::all_of(hierarchy.ranks_of_host.begin(), hierarchy.ranks_of_host.end(),
                     [first](const auto& ranks) { return ranks.size() == first; });
}

bool is_on_rail(const Hierarchy& hierarchy) { return hierarchy.host.index() < rail_count(hierarchy); }

Reduction inside_host(const Call& call) { return part_of({call.dtype, call.op, 1, partial_type(call.dtype, call.op)}); }

Reduction across_hosts(const Hierarchy& hierarchy, const Call& call) {
  return {partial_type(call.dtype, call.op), call.op, hierarchy.divisor, call.dtype};
}

Algorithm algorithm_across(const Hierarchy& hierarchy, const Call& call, size_t count) {
  if (partial_type(call.dtype, call.op) != call.dtype) return Algorithm::kDirect;
  const int hosts = static_cast<int>(hierarchy.ranks_of_host.size());
  return select_allreduce(Algorithm::kAuto, hierarchy.over, count * size_of(call.dtype), call.dtype, call.op, hosts,
                          hosts);
}

std::vector<int> rail(const Hierarchy& hierarchy, int index) {
  std::vector<int> members;
  for (const auto& ranks : hierarchy.ranks_of_host) members.push_back(ranks[index]);
  return members;
}

Shards shards_of(const Hierarchy& hierarchy, size_t item, size_t count) {
  const size_t ranks = static_cast<size_t>(hierarchy.host.size());
  const size_t rails = static_cast<size_t>(rail_count(hierarchy));
  const size_t lines = (count + kShardAlignment - 1) / kShardAlignment;
  Shards shards{std::vector<size_t>(ranks), std::vector<size_t>(ranks), std::vector<size_t>(ranks)};
  for (size_t index = 0; index < ranks; ++index) {
    const size_t begin = std::min(lines * std::min(index, rails) / rails * kShardAlignment, count);
    const size_t end = std::min(lines * std::min(index + 1, rails) / rails * kShardAlignment, count);
    shards.counts[index] = end - begin;
    shards.sizes[index] = shards.counts[index] * item;
    shards.offsets[index] = begin * item;
  }
  return shards;
}

void hierarchical_allreduce(Hierarchy& hierarchy, const Call& call, const void* in, void* out) {
  const bool is_direct = algorithm_across(hierarchy, call, call.count) == Algorithm::kDirect;
  if (const size_t pieces = is_direct ? piece_count(hierarchy, call) : 0) {
    return allreduce_in_pieces(hierarchy, call, in, out, pieces);
  }
  HostGroup& host = hierarchy.host;
  const size_t count = call.count;
  const Reduction inside = inside_host(call);
  // Partial sums need separate memory if their type is not the result's.
  const auto memory_for = [&](size_t elements, std::byte* result) {
    return inside.result == call.dtype ? result : hierarchy.partials.get(elements * inside.result_bytes());
  };
  const size_t bytes = count * size_of(call.dtype);
  if (bytes <= kSmallBytes && bytes * rail_count(hierarchy) <= kWholeBytes && is_homogeneous(hierarchy)) {
    std::byte* const sum = memory_for(count, static_cast<std::byte*>(out));
    host.allreduce(call, inside, in, sum, count);
    allreduce_across(hierarchy, call, rail(hierarchy, host.index()), sum, out, count);
    return;
  }

  const Shards shards = shards_of(hierarchy, size_of(call.dtype), call.count);
  const size_t index = static_cast<size_t>(host.index());
  std::byte* const shard = static_cast<std::byte*>(out) + shards.offsets[index];
  std::byte* const sum = memory_for(shards.counts[index], shard);
  host.reduce_scatter(call, inside, in, shards.counts, sum);
  if (is_on_rail(hierarchy)) {
    allreduce_across(hierarchy, call, rail(hierarchy, host.index()), sum, shard, shards.counts[index]);
  }
  host.share(call, shard, out, {shards.sizes, shards.offsets});
}

void hierarchical_reduce(Hierarchy& hierarchy, const Call& call, const void* in, void* out) {
  HostGroup& host = hierarchy.host;
  if (call.count * size_of(call.dtype) <= kSmallBytes) return reduce_by_leaders(hierarchy, call, in, out);
  if (const size_t pieces = piece_count(hierarchy, call)) return reduce_in_pieces(hierarchy, call, in, out, pieces);

  const Shards shards = shards_of(hierarchy, size_of(call.dtype), call.count);
  const size_t index = static_cast<size_t>(host.index());
  const Reduction across = across_hosts(hierarchy, call);
  const size_t sum_bytes = (shards.counts[index] * across.item_bytes() + kLine - 1) / kLine * kLine;
  std::byte* const sum = hierarchy.partials.get(sum_bytes + shards.sizes[index]);
  std::byte* const shard = sum + sum_bytes;
  host.reduce_scatter(call, inside_host(call), in, shards.counts, sum);
  const int root_host = host_of(hierarchy, call.root);
  if (is_on_rail(hierarchy)) {
    Call part = call;
    part.count = shards.counts[index];
    const std::vector<int> members = rail(hierarchy, host.index());
    reduce_to_root(Group(hierarchy.mesh, members), part, sum, shard, root_host, across, hierarchy.scratch,
                   kSegmentBytes, kOneStepBytes / rail_count(hierarchy));
  }
  if (hierarchy.my_host != root_host) return;
  const int root = position(hierarchy.ranks_of_host[root_host], call.root);
  host.share(call, shard, out, {shards.sizes, shards.offsets}, root);
}

// The ranks of a host share a segment of a large array while the next one is on its way.
void hierarchical_broadcast(Hierarchy& hierarchy, const Call& call, void* data) {
  const size_t bytes = call.count * size_of(call.dtype);
  const std::vector<int> members = leaders(hierarchy, call.root);
  const std::vector<int>& mine = hierarchy.ranks_of_host[hierarchy.my_host];
  const int leader = members[hierarchy.my_host];
  std::vector<size_t> sizes(mine.size()), offsets(mine.size());
  const auto share = [&](const Range& segment) {
    std::byte* const begin = static_cast<std::byte*>(data) + segment.begin;
    sizes[position(mine, leader)] = segment.count;
    hierarchy.host.share(call, begin, begin, {sizes, offsets});
  };
  const bool is_leader = members.size() > 1 && leader == hierarchy.mesh.rank();
  if (members.size() == 1 || bytes <= kSegmentBytes) {
    if (is_leader) broadcast(Group(hierarchy.mesh, members), call, data, bytes, position(members, call.root));
    return share({0, bytes});
  }
  if (is_leader) {
    const HostGroup::Driving driving(hierarchy.host, hierarchy.mesh);
    const Group group(hierarchy.mesh, members);
    return broadcast(group, call, data, bytes, position(members, call.root), kSegmentBytes, share);
  }
  for (const Range& segment : Chunks::even(bytes, 1).segments(0, kSegmentBytes)) share(segment);
}

void hierarchical_reduce_scatter(Hierarchy& hierarchy, const Call& call, const void* in, std::span<const size_t> counts,
                                 void* out) {
  HostGroup& host = hierarchy.host;
  const Reduction inside = inside_host(call);
  const size_t result_bytes = inside.result_bytes();
  const size_t largest = *std::max_element(counts.begin(), counts.end()) * result_bytes;
  if (const size_t segment_bytes = segment_bytes_for(hierarchy, largest)) {
    return reduce_scatter_in_pieces(hierarchy, call, in, counts, out, segment_bytes);
  }
  const bool is_small = call.count * inside.item_bytes() <= kSmallBytes;
  const std::vector<int> members = rail(hierarchy, host.index());
  std::vector<size_t> carried;  // elements that this rank sends along the rail, by host
  for (int rank : members) carried.push_back(counts[rank]);
  const size_t carried_count = std::accumulate(carried.begin(), carried.end(), size_t{0});
  const size_t sums_count = is_small ? call.count : 0;  // of the whole host
  std::byte* const sums = hierarchy.partials.get((carried_count + sums_count) * result_bytes);
  std::byte* const pieces = sums + sums_count * result_bytes;

  std::vector<size_t> starts(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), starts.begin(), size_t{0});
  if (is_small) host.allreduce(call, inside, in, sums, call.count);
  std::byte* piece = pieces;
  for (size_t number = 0; number < members.size(); piece += carried[number++] * result_bytes) {
    if (is_small) {
      std::copy_n(sums + starts[members[number]] * result_bytes, carried[number] * result_bytes, piece);
      continue;
    }
    const std::vector<int>& theirs = hierarchy.ranks_of_host[number];
    std::vector<size_t> of_host, offsets;
    for (int rank : theirs) {
      of_host.push_back(counts[rank]);
      offsets.push_back(starts[rank]);
    }
    host.reduce_scatter(call, inside, in, of_host, offsets, piece);
  }
  reduce_scatterv(Group(hierarchy.mesh, members), call, pieces, carried, out, across_hosts(hierarchy, call),
                  hierarchy.scratch);
}

// Each rank receives the blocks of its rail from the other hosts, and the ranks of a host exchange the received blocks.
// So every block enters a host once, and all ranks of a host receive at the same time.
void hierarchical_allgather(Hierarchy& hierarchy, const Call& call, const void* in, void* out,
                            std::span<const size_t> sizes) {
  const size_t largest = *std::max_element(sizes.begin(), sizes.end());
  if (const size_t segment_bytes = segment_bytes_for(hierarchy, largest)) {
    return allgather_in_pieces(hierarchy, call, in, out, sizes, segment_bytes);
  }
  std::vector<size_t> starts(sizes.size());
  std::exclusive_scan(sizes.begin(), sizes.end(), starts.begin(), size_t{0});
  const std::vector<int> members = rail(hierarchy, hierarchy.host.index());
  std::vector<size_t> carried;
  for (int rank : members) carried.push_back(sizes[rank]);
  std::byte* block = hierarchy.scratch.get(std::accumulate(carried.begin(), carried.end(), size_t{0}));
  allgatherv(Group(hierarchy.mesh, members), call, in, block, carried);
  for (size_t host = 0; host < members.size(); block += carried[host++]) {
    std::vector<size_t> bytes, offsets;
    for (int rank : hierarchy.ranks_of_host[host]) {
      bytes.push_back(sizes[rank]);
      offsets.push_back(starts[rank]);
    }
    hierarchy.host.share(call, block, out, {bytes, offsets});
  }
}

void hierarchical_barrier(Hierarchy& hierarchy, const Call& call) {
  if (hierarchy.host.index() == 0) barrier(Group(hierarchy.mesh, rail(hierarchy, 0)), call);
  hierarchy.host.announce(call);
}

}  // namespace ronde
