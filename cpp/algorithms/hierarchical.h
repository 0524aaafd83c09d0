// Collectives over several hosts with several ranks each: shared memory inside a host, links across.
#pragma once

#include <span>
#include <vector>

#include "algorithms/select.h"
#include "base/scratch.h"
#include "communicator/call.h"
#include "host/host_group.h"
#include "links/mesh.h"

namespace ronde {

// The arguments that the hierarchical algorithms share. It refers to its parts and owns none.
struct Hierarchy {
  HostGroup& host;
  Mesh& mesh;
  const std::vector<std::vector<int>>& ranks_of_host;  // by host number, each ascending
  int my_host;
  Scratch& scratch;
  Scratch& partials;  // memory for partial sums inside the host
  int divisor;        // of an average
  SwitchOver over;
};

// The number of rails, and the ranks on one of them, by host number.
int rail_count(const Hierarchy& hierarchy);
std::vector<int> rail(const Hierarchy& hierarchy, int index);
bool is_on_rail(const Hierarchy& hierarchy);  // this rank
// The place of a rank of the communicator among `ranks`, and the number of its host.
int position(const std::vector<int>& ranks, int rank);
int host_of(const Hierarchy& hierarchy, int rank);
// Whether all hosts have equally many ranks.
bool is_homogeneous(const Hierarchy& hierarchy);

// The elements of an array, cut into one shard per rail, by local rank. The shard of a rank on no rail is empty. All
// hosts have the same shards.
struct Shards {
  std::vector<size_t> counts;
  std::vector<size_t> sizes;    // bytes
  std::vector<size_t> offsets;  // bytes
};
Shards shards_of(const Hierarchy& hierarchy, size_t item_bytes, size_t count);
inline constexpr size_t kShardAlignment = 64;  // elements; where a shard begins

// The reductions of the two stages. Only the last one divides an average, and only it rounds 16-bit floats.
Reduction inside_host(const Call& call);
Reduction across_hosts(const Hierarchy& hierarchy, const Call& call);
// The algorithm by which the rails all-reduce an array of `count` elements: one that can, given the types. The rails
// share the link of their host, so it depends on what all of them carry.
Algorithm algorithm_across(const Hierarchy& hierarchy, const Call& call, size_t count);

// `in` may be `out`. Sums are formed in rank order inside a host, then in host order.
void hierarchical_allreduce(Hierarchy& hierarchy, const Call& call, const void* in, void* out);

// Only rank call.root gets the result; the other ranks ignore `out`.
void hierarchical_reduce(Hierarchy& hierarchy, const Call& call, const void* in, void* out);

// Rank r gets counts[r] elements of the reduction, behind those of the ranks before it; call.count in all. All hosts
// have the same number of ranks. `out` may be this rank's part of `in`.
void hierarchical_reduce_scatter(Hierarchy& hierarchy, const Call& call, const void* in, std::span<const size_t> counts,
                                 void* out);

// All ranks get `data` of rank call.root.
void hierarchical_broadcast(Hierarchy& hierarchy, const Call& call, void* data);

// Blocks of different sizes, by rank. All hosts have the same number of ranks. `in` may be this rank's block of `out`.
void hierarchical_allgather(Hierarchy& hierarchy, const Call& call, const void* in, void* out,
                            std::span<const size_t> sizes);

// Call it after the ranks of each host have announced the call (HostGroup::announce).
void hierarchical_barrier(Hierarchy& hierarchy, const Call& call);

}  // namespace ronde
