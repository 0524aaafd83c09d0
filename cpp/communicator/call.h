// The signature of one collective call, on which all ranks must agree before any byte is combined.
#pragma once

#include <cstdint>
#include <string>

#include "base/types.h"

namespace ronde {

// Travels in shared memory and on the wire (little endian, like every supported machine). Two ranks agree when all
// fields are equal. Operations whose counts may differ between ranks (all-gather, all-to-all, ...) leave count at 0.
struct Call {
  uint64_t sequence = 0;  // the number of collective calls before this one on its communicator
  uint64_t count = 0;     // elements
  uint64_t shape = 0;     // word_of_shape(): of the array, or of a row where the numbers of rows may differ
  int32_t root = -1;      // -1: no root; for send/receive the tag
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  uint8_t algorithm : 7 = 0;  // see algorithms/select.h; differs if the settings differ
  uint8_t is_sealed : 1 = 0;  // its payload carries tags between hosts whatever the settings

  bool operator==(const Call&) const = default;
  bool is_known() const;         // whether kind, type and operation exist; for calls from other ranks
  std::string describe() const;  // "allreduce of 10 float32 by sum"
};
static_assert(sizeof(Call) == 32);

// Describes how two calls differ, with both ranks: "rank 0 called ..., but rank 2 called ...".
std::string describe_mismatch(int rank_a, const Call& a, int rank_b, const Call& b);

}  // namespace ronde
