// The signature of one collective call: what every rank must agree on before any byte is combined.
#pragma once

#include <cstdint>
#include <string>

#include "types.h"

namespace ronde {

// Travels in shared memory and on the wire (little endian, as every machine we build for). Two ranks agree when all
// fields are equal. Operations whose counts may differ between ranks (all-gather, all-to-all, ...) leave count at 0.
struct Call {
  uint64_t sequence = 0;  // how many collective calls this communicator has made before this one
  uint64_t count = 0;     // elements
  uint64_t shape = 0;     // word_of_shape(): of the array, or of a row where the numbers of rows may differ
  int32_t root = -1;      // -1 where there is no root; for send/receive the tag
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  uint8_t algorithm : 7 = 0;  // see algorithms/select.h; a disagreement here is a difference in settings
  uint8_t is_sealed : 1 = 0;  // its payload carries tags between hosts, whatever the settings say

  bool operator==(const Call&) const = default;
  bool is_known() const;         // of one that has arrived: whether kind, type and operation are any
  std::string describe() const;  // "allreduce of 10 float32 by sum"
};
static_assert(sizeof(Call) == 32);

// Says how the two calls differ, naming both ranks: "rank 0 called ..., but rank 2 called ...".
std::string describe_mismatch(int rank_a, const Call& a, int rank_b, const Call& b);

}  // namespace ronde
