// Collectives over several hosts with several ranks each: shared memory inside a host, links across.
#pragma once

#include <span>
#include <vector>

#include "algorithms/select.h"
#include "call.h"
#include "host_group.h"
#include "mesh.h"
#include "scratch.h"

namespace ronde {

// What the hierarchical algorithms work on; refers to its parts, owns none.
struct Hierarchy {
  HostGroup& host;
  Mesh& mesh;
  const std::vector<std::vector<int>>& ranks_of_host;  // by host number, each ascending
  int my_host;
  Scratch& scratch;
  Scratch& partials;  // of the sums inside the host
  int divisor;        // of an average
  SwitchOver over;
};

// How many rails there are, and who is on one, by host number.
int rail_count(const Hierarchy& hierarchy);
std::vector<int> rail(const Hierarchy& hierarchy, int index);
// Whether all hosts have equally many ranks.
bool is_homogeneous(const Hierarchy& hierarchy);

// The elements of a call, cut into one shard per rail; of ranks that are on no rail it is empty. By local rank, and the
// same on all hosts.
struct Shards {
  std::vector<size_t> counts;
  std::vector<size_t> sizes;    // bytes
  std::vector<size_t> offsets;  // bytes
};
Shards shards_of(const Hierarchy& hierarchy, const Call& call);

// in == out is allowed. Sums go in rank order inside a host, then in host order.
void hierarchical_allreduce(Hierarchy& hierarchy, const Call& call, const void* in, void* out);

// The result arrives at rank call.root; `out` is ignored elsewhere.
void hierarchical_reduce(Hierarchy& hierarchy, const Call& call, const void* in, void* out);

// `data` of rank call.root arrives everywhere.
void hierarchical_broadcast(Hierarchy& hierarchy, const Call& call, void* data);

// Blocks of different sizes, by rank. All hosts have the same number of ranks; in may be the own block of out.
void hierarchical_allgather(Hierarchy& hierarchy, const Call& call, const void* in, void* out,
                            std::span<const size_t> sizes);

// The ranks of each host have met (HostGroup::announce) before.
void hierarchical_barrier(Hierarchy& hierarchy, const Call& call);

}  // namespace ronde
