// Hierarchical collectives of large arrays, piece by piece: while one piece is on its way between the hosts, the ranks
// of a host reduce the next one or share the one before.
//
// piece_count() and segment_bytes_for() return 0 for arrays that are too small. They return the same on all ranks.
#pragma once

#include <span>

#include "algorithms/hierarchical.h"

namespace ronde {

// For a reduction to a root, and an all-reduce that is direct between the hosts.
size_t piece_count(const Hierarchy& hierarchy, const Call& call);
// As hierarchical_allreduce(), and hierarchical_reduce(), in that many pieces.
void allreduce_in_pieces(Hierarchy& hierarchy, const Call& call, const void* in, void* out, size_t pieces);
void reduce_in_pieces(Hierarchy& hierarchy, const Call& call, const void* in, void* out, size_t pieces);

// For an operation in which the ranks of a rail pass on parts of at most `largest` bytes.
size_t segment_bytes_for(const Hierarchy& hierarchy, size_t largest);
// As hierarchical_reduce_scatter(), and hierarchical_allgather(), in pieces with that many bytes from each part.
void reduce_scatter_in_pieces(Hierarchy& hierarchy, const Call& call, const void* in, std::span<const size_t> counts,
                              void* out, size_t segment_bytes);
void allgather_in_pieces(Hierarchy& hierarchy, const Call& call, const void* in, void* out,
                         std::span<const size_t> sizes, size_t segment_bytes);

}  // namespace ronde
