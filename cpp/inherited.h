// Whether an object came into this process by fork(). Then another thread of the parent may have held its mutex or
// been changing its containers at that moment, and neither will ever be set right here: it must be left as it is.
#pragma once

#include <pthread.h>

#include <atomic>

namespace ronde {

class Birthplace {
 public:
  Birthplace() : forks_(forks()) {}
  bool is_inherited() const { return forks_ != forks(); }

 private:
  // How often this process's line of ancestors has forked since this library was loaded.
  static unsigned forks() {
    static std::atomic<unsigned> count{0};
    [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1); });
    return count.load(std::memory_order_relaxed);
  }

  unsigned forks_;
};

}  // namespace ronde
