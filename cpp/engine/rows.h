// How many rows of a tensor each rank has: the coordinator tells them, and they say how far memory is read and written.
#pragma once

#include <cstdint>
#include <span>

#include "engine/signature.h"

namespace ronde {

// Throws ProtocolError, which names rank 0, unless the shape and the rows fit each other, this rank's own tensor and an
// address space. `rows`: as Work has them, of a single tensor.
void check_rows(const Signature& signature, std::span<const uint64_t> rows, int rank, int size);

}  // namespace ronde
