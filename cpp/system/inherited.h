// Tells whether an object came into this process by fork(). Another thread of the parent may have held its mutex or
// been changing its containers at that moment, and in the child nothing repairs them: such an object must not be
// touched.
#pragma once

#include <pthread.h>

#include <atomic>

namespace ronde {

class ForkOrigin {
 public:
  ForkOrigin() : forks_(forks()) {}
  bool is_inherited() const { return forks_ != forks(); }

 private:
  // The number of forks between the process that loaded this library and this one.
  static unsigned forks() {
    static std::atomic<unsigned> count{0};
    [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1); });
    return count.load(std::memory_order_relaxed);
  }

  unsigned forks_;
};

}  // namespace ronde
