// See parsers.cc.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace ronde::fuzz {

// Returns, or the process aborts: then the input has found a fault.
void run_one(std::span<const std::byte> input);

// For each parser inputs that it accepts, to begin with.
std::vector<std::vector<std::byte>> seeds();

}  // namespace ronde::fuzz
