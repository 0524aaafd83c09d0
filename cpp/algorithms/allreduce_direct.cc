// All-reduce by direct reduction.
//
// The buffer is cut evenly into one chunk per rank. Every rank reduces its own chunk and sends the result to all
// others: the direct reduction of direct.cc with all ranks as receivers. Each rank sends and receives 2 (ranks - 1) /
// ranks times the buffer, which is the least possible (the lower bound of Patarasuk, Yuan, "Bandwidth Optimal
// All-reduce Algorithms for Clusters of Workstations", J. Parallel Distrib. Comput. 69(2), 2009), in two steps where a
// ring needs 2 (ranks - 1).
#include "algorithms/direct.h"

namespace ronde {

void allreduce_direct(const Group& group, const Call& call, const void* in, void* out, const Reduction& reduction,
                      Scratch& scratch, size_t segment_bytes) {
  const Chunks chunks = Chunks::even(call.count, group.size());
  std::byte* all = static_cast<std::byte*>(out);
  std::byte* own = all + chunks[group.rank()].begin * reduction.result_bytes();
  reduce_by_owners(group, call, chunks, in, {kAllRanks, own, all}, reduction, scratch, segment_bytes);
}

}  // namespace ronde
