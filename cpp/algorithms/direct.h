// The direct reduction, common to all-reduce, reduce and reduce-scatter. See direct.cc for how it goes.
#pragma once

#include "algorithms/chunks.h"
#include "algorithms/over_links.h"

namespace ronde {

// Who gets the reduced chunks besides their owners.
inline constexpr int kEverybody = -1;
inline constexpr int kNobody = -2;

struct Results {
  int receiver;    // a rank, kEverybody or kNobody
  std::byte* own;  // where this rank's chunk goes; null: nowhere, it is only passed on to the receiver
  std::byte* all;  // where the chunks of all ranks go, if this rank is the receiver
};

// Rank r reduces chunk r of everybody's `in`, in rank order, and passes it on as `results` says.
void reduce_by_owners(const Group& group, const Call& call, const Chunks& chunks, const void* in,
                      const Results& results, const Reduction& reduction, Scratch& scratch, size_t segment_bytes);

}  // namespace ronde
