// Adasum: sums of vectors that take into account how far they point in the same direction.
//
// For two vectors a and b it is
//     (1 - a.b / 2 a.a) a  +  (1 - a.b / 2 b.b) b
// that is a + b if they are orthogonal and their mean if they are equal; a vector of zeros changes nothing. More ranks
// are combined as a binary tree: 0 with 1, 2 with 3, ..., then 0 and 1 with 2 and 3, and so on. So their number must be
// a power of two. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
//
// The common rules:
//   - The buffer holds vectors one behind the other, counts[0] elements, counts[1], ..., call.count in all. Each is
//     combined by itself: its weights are its own. All ranks pass the same counts.
//   - call.dtype has dot products (reduce.h). Products are formed and summed in float64, the vectors are rounded to
//     their own type once at every level of the tree.
//   - `in` may be `out`, or overlap it nowhere. All ranks get bitwise the same result.
#pragma once

#include <cstddef>
#include <span>

#include "algorithms/hierarchical.h"
#include "call.h"
#include "group.h"
#include "host_group.h"
#include "scratch.h"

namespace ronde {

// Over links.
void adasum(const Group& group, const Call& call, const void* in, void* out, std::span<const size_t> counts,
            Scratch& scratch);

// Among the ranks of one host. Announces the call.
void adasum_in_host(HostGroup& host, const Call& call, const void* in, void* out, std::span<const size_t> counts,
                    Scratch& scratch);

// The average of the ranks of each host, and Adasum of the hosts' averages: their number must be a power of two. Each
// rank carries a shard between the hosts, but the products are those of whole vectors, so that the result does not
// depend on how many ranks a host has.
void hierarchical_adasum(Hierarchy& hierarchy, const Call& call, const void* in, void* out,
                         std::span<const size_t> counts);

}  // namespace ronde
