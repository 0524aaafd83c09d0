// Chooses the algorithm of an all-reduce. Every rank must choose the same, so the choice depends only on what all ranks
// know: the settings, the call, and the numbers of ranks and hosts.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "kernels/reduction.h"

namespace ronde {

// The numbers travel in Call::algorithm and are those of the setting `allreduce_algorithm`.
enum class Algorithm : uint8_t {
  kAuto = 0,
  kDirect = 1,
  kRing = 2,
  kDoubling = 3,
  kHierarchical = 4,
  kInHost = 5,              // shared memory alone
  kAdasum = 6,              // follows from the reduction, not from the setting
  kHierarchicalAdasum = 7,  // likewise
  kElsewhere = 8,           // another library moves the bytes (engine/backend.h)
};

// The sizes at which `auto` changes from one algorithm to the next. The engine may tune them while a job runs.
struct SwitchOver {
  static constexpr size_t kByRanks = size_t{1} << 62;  // larger than any tensor

  size_t hierarchical_bytes = 0;  // from this size on, hosts with several ranks first reduce inside the host
  // Up to this size doubling, which has the fewest steps; select_across() adapts the size to the number of ranks.
  size_t doubling_bytes = 64 * 1024;
  size_t ring_bytes = kByRanks;  // from this size on a ring; kByRanks: where each of many ranks has a large chunk
};

// The numbers come from src/ronde/bench/cost_model.py, which calls this; a test compares the choice with all others.
inline Algorithm select_across(const SwitchOver& over, size_t bytes, int size) {
  constexpr int kDirectRanks = 16;  // each rank of direct sends to all others at once
  constexpr size_t kRingChunkBytes = 64 * 1024;
  constexpr size_t kManyRanks = 32;
  const auto ranks = static_cast<size_t>(size);
  // Doubling has two steps more if the number of ranks is no power of two; direct has fewer than that for few ranks.
  const size_t divisor = size <= kDirectRanks && !std::has_single_bit(ranks) ? 4 : 1;
  const size_t limit = over.doubling_bytes / divisor;
  if (bytes <= limit) return Algorithm::kDoubling;
  const bool is_by_ranks = over.ring_bytes == SwitchOver::kByRanks;
  // With very many ranks each rank's messages of direct, two to every other, take longer than more bytes. A size for
  // the ring that is set remains.
  const size_t factor = std::max(ranks / kManyRanks, size_t{1});
  if (bytes <= limit * factor && bytes < over.ring_bytes) return Algorithm::kDoubling;
  const bool is_ring = is_by_ranks ? size > kDirectRanks && bytes >= ranks * kRingChunkBytes : bytes >= over.ring_bytes;
  return is_ring ? Algorithm::kRing : Algorithm::kDirect;
}

inline Algorithm select_allreduce(Algorithm wanted, const SwitchOver& over, size_t bytes, DType dtype, ReduceOp op,
                                  int size, int hosts) {
  if (needs_all_at_once(dtype, op)) return hosts == 1 ? Algorithm::kInHost : Algorithm::kDirect;
  if (wanted != Algorithm::kAuto && wanted != Algorithm::kHierarchical) return wanted;
  if (hosts == 1) return Algorithm::kInHost;
  if (hosts < size && (wanted == Algorithm::kHierarchical || bytes >= over.hierarchical_bytes)) {
    return Algorithm::kHierarchical;
  }
  // As if each host had one rank. Doubling and ring would have to forward sums of 16-bit floats as float32.
  if (partial_type(dtype, op) != dtype) return Algorithm::kDirect;
  return select_across(over, bytes, size);
}

}  // namespace ronde
