// Sleeping on a word of memory until another thread changes it and wakes the sleepers.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

namespace ronde {

// Sleeps for at most `limit_ns`; only threads of this process can wake it. Returns false if a signal or the time limit
// ends the sleep.
inline bool futex_sleep(std::atomic<uint32_t>& word, uint32_t while_it_is, int64_t limit_ns = 1'000'000'000) {
  const timespec limit{limit_ns / 1'000'000'000, limit_ns % 1'000'000'000};
  return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, while_it_is, &limit, nullptr, 0) == 0 || errno == EAGAIN;
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace ronde
