// Reduce-scatter with a count per rank, in rank order.
//
// Every rank sends each other rank its contribution to that rank's piece and reduces its own piece: the first step of
// the direct reduction (direct.cc), without the second.
#include "algorithms/direct.h"

namespace ronde {

void reduce_scatterv(const Group& group, const Call& call, const void* in, std::span<const size_t> counts, void* out,
                     const Reduction& reduction, Scratch& scratch, size_t segment_bytes) {
  const Results results{.receiver = kNoRank, .own = static_cast<std::byte*>(out), .all = nullptr};
  reduce_by_owners(group, call, Chunks::of(counts), in, results, reduction, scratch, segment_bytes);
}

}  // namespace ronde
