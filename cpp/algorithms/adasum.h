// Adasum: a sum of vectors that takes into account how far they point in the same direction.
//
// The sum of two vectors a and b is
//     (1 - a.b / 2 a.a) a  +  (1 - a.b / 2 b.b) b
// that is a + b if they are orthogonal and their mean if they are equal. A vector of zeros changes nothing. More ranks
// combine along a binary tree: 0 with 1, 2 with 3, ..., then 0 and 1 with 2 and 3, and so on, so their number must be a
// power of two. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
//
// The common rules:
//   - The buffer holds vectors one behind the other, of counts[0], counts[1], ... elements, call.count in all. Each
//     vector has its own weights. All ranks pass the same counts.
//   - call.dtype has dot products (reduce.h). Products and their sums are float64. Each level of the tree rounds the
//     vectors to their type once.
//   - `in` equals `out` or does not overlap it. All ranks get bitwise the same result.
#pragma once

#include <cstddef>
#include <span>

#include "algorithms/hierarchical.h"
#include "base/scratch.h"
#include "communicator/call.h"
#include "host/group.h"
#include "host/host_group.h"

namespace ronde {

// Over links.
void adasum(const Group& group, const Call& call, const void* in, void* out, std::span<const size_t> counts,
            Scratch& scratch);

// Among the ranks of one host. Announces the call.
void adasum_in_host(HostGroup& host, const Call& call, const void* in, void* out, std::span<const size_t> counts,
                    Scratch& scratch);

// Averages the ranks of each host, then applies Adasum to the hosts' averages: the number of hosts must be a power of
// two. Each rank carries a shard between the hosts, but the products are those of whole vectors, so the result does not
// depend on the number of ranks per host.
void hierarchical_adasum(Hierarchy& hierarchy, const Call& call, const void* in, void* out,
                         std::span<const size_t> counts);

}  // namespace ronde
