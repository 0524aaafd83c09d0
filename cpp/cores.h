#pragma once

#include <sched.h>

#include <algorithm>

namespace ronde {

// On how many cores this process may run.
inline int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(CPU_COUNT(&set), 1) : 1;
}

}  // namespace ronde
