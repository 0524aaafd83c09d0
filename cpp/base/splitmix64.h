// SplitMix64 (Steele, Lea and Flood 2014): random numbers by their places in a sequence, the same on every machine.
#pragma once

#include <cstdint>

namespace ronde {

constexpr uint64_t kSplitMixStep = 0x9e3779b97f4a7c15u;  // from one state to the next

// The number of a state; also a hash of 64 bits, where that of 0 is 0.
constexpr uint64_t splitmix64(uint64_t state) {
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
  return state ^ (state >> 31);
}

}  // namespace ronde
