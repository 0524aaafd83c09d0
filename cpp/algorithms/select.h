// Which algorithm an all-reduce takes. Every rank must come to the same answer, so it depends only on what all know:
// the settings, the call, and how many ranks are on how many hosts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "reduction.h"
#include "types.h"

namespace ronde {

// The numbers travel in Call::algorithm and are those of the setting `allreduce_algorithm`.
enum class Algorithm : uint8_t {
  kAuto = 0,
  kDirect = 1,
  kRing = 2,
  kDoubling = 3,
  kHierarchical = 4,
  kInHost = 5,  // shared memory alone
  kAdasum = 6,  // these two are no choice: they belong to the reduction
  kHierarchicalAdasum = 7,
  kElsewhere = 8,  // another library moves the bytes (engine/backend.h)
};

// At which sizes `auto` goes over from one algorithm to the next. They may be tuned while a job runs.
struct SwitchOver {
  static constexpr size_t kByRanks = size_t{1} << 62;  // no tensor is so large

  size_t hierarchical_bytes = 0;      // hosts with several ranks: from this size on reduce inside the host first
  size_t doubling_bytes = 16 * 1024;  // up to this size doubling, which has the fewest steps
  size_t ring_bytes = kByRanks;       // from this size on a ring; by default with more than kDirectRanks
};

inline Algorithm select_allreduce(Algorithm wanted, const SwitchOver& over, size_t bytes, DType dtype, ReduceOp op,
                                  int size, int hosts) {
  if (needs_all_at_once(dtype, op)) return hosts == 1 ? Algorithm::kInHost : Algorithm::kDirect;
  if (wanted != Algorithm::kAuto && wanted != Algorithm::kHierarchical) return wanted;
  if (hosts == 1) return Algorithm::kInHost;
  if (hosts < size && (wanted == Algorithm::kHierarchical || bytes >= over.hierarchical_bytes)) {
    return Algorithm::kHierarchical;
  }
  // As if there was one rank per host. Doubling and ring have to pass on sums of 16-bit floats as float32 numbers.
  constexpr int kDirectRanks = 16;  // direct talks to all at once
  if (partial_type(dtype, op) != dtype) return Algorithm::kDirect;
  if (bytes <= over.doubling_bytes) return Algorithm::kDoubling;
  const bool is_ring = over.ring_bytes == SwitchOver::kByRanks ? size > kDirectRanks : bytes >= over.ring_bytes;
  return is_ring ? Algorithm::kRing : Algorithm::kDirect;
}

}  // namespace ronde
