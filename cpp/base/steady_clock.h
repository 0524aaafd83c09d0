// The clock that measures and limits every wait in C++. Setting the system's time does not change it. Python's
// time.monotonic_ns() reads the same clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace ronde {

inline int64_t steady_now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace ronde
