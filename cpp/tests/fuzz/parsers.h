// The interface between a fuzzer and the parsers (parsers.cc).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace ronde::fuzz {

// Runs one input. The process aborts if the input finds a fault.
void run_one(std::span<const std::byte> input);

// Initial inputs, some for each parser, which the parser accepts.
std::vector<std::vector<std::byte>> seeds();

}  // namespace ronde::fuzz
