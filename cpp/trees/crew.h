// Threads that share the work of one call. They exist as long as the object; with one thread there are no others.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "base/function_ref.h"

namespace ronde {

// Not thread-safe: one thread makes the object and calls run().
class Crew {
 public:
  // Starts `threads` - 1 threads, with all signals blocked; fewer if the system has no more.
  explicit Crew(size_t threads);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // How many threads take part, with the caller.
  size_t size() const { return threads_.size() + 1; }

  // Calls the body once for each number below `parts`, in any order and in several threads at once. Returns when all
  // calls have returned. The body must not throw.
  void run(size_t parts, FunctionRef<void(size_t)> body);

 private:
  void serve();
  void take_parts();

  std::vector<std::thread> threads_;
  const FunctionRef<void(size_t)>* body_ = nullptr;
  size_t parts_ = 0;
  std::atomic<size_t> next_{0};
  std::atomic<uint32_t> busy_{0};  // threads that may still use the body
  std::atomic<uint32_t> call_{0};  // the number of the call; changes when there is work, or the end
  bool ends_ = false;
};

}  // namespace ronde
