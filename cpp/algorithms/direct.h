// The direct reduction, common to all-reduce, reduce and reduce-scatter. direct.cc describes its steps.
#pragma once

#include "algorithms/chunks.h"
#include "algorithms/over_links.h"

namespace ronde {

// The ranks that get the reduced chunks besides the owners.
inline constexpr int kAllRanks = -1;
inline constexpr int kNoRank = -2;

struct Results {
  int receiver;    // a rank, kAllRanks or kNoRank
  std::byte* own;  // the destination of this rank's chunk; null: this rank only sends it to the receiver
  std::byte* all;  // the destination of all ranks' chunks if this rank is a receiver
};

// Rank r reduces chunk r of all ranks' `in`, in rank order, and sends it to the receivers in `results`.
void reduce_by_owners(const Group& group, const Call& call, const Chunks& chunks, const void* in,
                      const Results& results, const Reduction& reduction, Scratch& scratch, size_t segment_bytes);

}  // namespace ronde
