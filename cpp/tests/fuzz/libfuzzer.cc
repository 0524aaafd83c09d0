// The parsers under libFuzzer (clang), which keeps and mutates inputs that reach new branches.
#include <cstdint>

#include "parsers.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ronde::fuzz::run_one({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
