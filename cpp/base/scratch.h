// Working memory that a communicator's collectives share. It grows to the largest request and never shrinks.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace ronde {

class Scratch {
 public:
  // At least `bytes` of uninitialised memory, aligned to a cache line. The previous contents are lost.
  std::byte* get(size_t bytes) {
    if (bytes > capacity_) {
      memory_.reset();  // before the allocation, so that both never exist at once
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
