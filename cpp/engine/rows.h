// Checks the numbers of rows that the coordinator sends. They determine how far a rank reads and writes memory.
#pragma once

#include <cstdint>
#include <span>

#include "engine/signature.h"

namespace ronde {

// Throws ProtocolError, which names rank 0, unless the rows fit the shape, this rank's tensor and the address space.
// `rows`: those of a single tensor, as in Work.
void check_rows(const Signature& signature, std::span<const uint64_t> rows, int rank, int size);

}  // namespace ronde
