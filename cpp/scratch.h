// Working memory that a communicator's collectives share: it grows to what the largest of them asked for and stays.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace ronde {

class Scratch {
 public:
  // At least `bytes` of uninitialised memory, aligned to a cache line; what it held before is lost.
  std::byte* get(size_t bytes) {
    if (bytes > capacity_) {
      memory_.reset();  // first, so that both never exist at once
      capacity_ = 0;
      memory_.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
      capacity_ = bytes;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};

  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };

  std::unique_ptr<std::byte, Free> memory_;
  size_t capacity_ = 0;
};

}  // namespace ronde
