// Collectives over several hosts with several ranks each: shared memory inside a host, links across.
#pragma once

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
  SwitchOver over;
};

// in == out is allowed. Sums go in rank order inside a host, then in host order.
void hierarchical_allreduce(Hierarchy& hierarchy, const Call& call, const void* in, void* out);

// The result arrives at rank call.root; `out` is ignored elsewhere.
void hierarchical_reduce(Hierarchy& hierarchy, const Call& call, const void* in, void* out);

// `data` of rank call.root arrives everywhere.
void hierarchical_broadcast(Hierarchy& hierarchy, const Call& call, void* data);

// The ranks of each host have met (HostGroup::announce) before.
void hierarchical_barrier(Hierarchy& hierarchy, const Call& call);

}  // namespace ronde
