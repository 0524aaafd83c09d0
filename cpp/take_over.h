// Reading lines that another core has written, so that it can write them again quickly.
//
// A plain read leaves a line shared by both cores, and the writer's next store to it must first take the reader's copy
// away: one slow round trip for each line, which no prefetcher hides (on AMD Zen 4 filling a buffer of 64 KiB again
// drops from 40 to 9 GB/s). A reader that also writes to the line owns it, and an owned line moves as fast as it is
// read. So: whoever is the only reader of staged memory writes one byte of every line back to it.
//
// Only for a sole reader, before it tells the writer that the memory is free again.
#pragma once

#include <cstddef>
#include <cstring>

namespace ronde {

inline constexpr size_t kLine = 64;

inline void take_over(std::byte* memory, size_t bytes) {
  for (size_t offset = 0; offset < bytes; offset += kLine) {
    volatile std::byte* line = memory + offset;
    *line = *line;
  }
}

// Line by line, which is faster than two passes: the processor fetches ahead for both at once.
inline void copy_and_take_over(void* to, std::byte* memory, size_t bytes) {
  auto* out = static_cast<std::byte*>(to);
  size_t offset = 0;
  for (; offset + kLine <= bytes; offset += kLine) {
    std::memcpy(out + offset, memory + offset, kLine);
    take_over(memory + offset, kLine);
  }
  if (offset == bytes) return;
  std::memcpy(out + offset, memory + offset, bytes - offset);
  take_over(memory + offset, bytes - offset);
}

}  // namespace ronde
