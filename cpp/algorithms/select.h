// Which algorithm an all-reduce takes. Every rank must come to the same answer, so it depends only on what all know:
// the settings, the call, and how many ranks are on how many hosts.
#pragma once

#include <cstddef>
#include <cstdint>

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

inline Algorithm select_allreduce(Algorithm wanted, size_t bytes, DType dtype, int size, int hosts) {
  if (wanted != Algorithm::kAuto && wanted != Algorithm::kHierarchical) return wanted;
  if (hosts == 1) return Algorithm::kInHost;
  if (hosts < size) return Algorithm::kHierarchical;
  // One rank per host. Doubling and ring round a 16-bit sum at every hop, direct only once.
  constexpr size_t kDoublingBytes = 16 * 1024;
  constexpr int kDirectHosts = 16;  // direct talks to all hosts at once
  if (size_of(dtype) == 2) return Algorithm::kDirect;
  if (bytes <= kDoublingBytes) return Algorithm::kDoubling;
  return hosts <= kDirectHosts ? Algorithm::kDirect : Algorithm::kRing;
}

}  // namespace ronde
