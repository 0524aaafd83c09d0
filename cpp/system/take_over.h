// Reads cache lines that another core has written, such that the other core can write them again quickly.
//
// A plain read leaves a line shared by both cores, and the writer's next store must first invalidate the reader's copy:
// one slow round trip per line, which no prefetcher hides (on AMD Zen 4 refilling a buffer of 64 KiB drops from 40 to 9
// GB/s). A reader that also writes to the line owns it, and ownership moves as fast as a read. So the only reader of
// staged memory writes one byte of every line back to it.
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

// Line by line, which is faster than two passes: the processor prefetches for both at once.
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
