#include "trees/crew.h"

#include <system_error>

#include "system/block_signals.h"

namespace ronde {

Crew::Crew(size_t threads) {
  const BlockSignals blocked;
  threads_.reserve(threads);
  try {
    while (threads_.size() + 1 < threads) threads_.emplace_back([this] { serve(); });
  } catch (const std::system_error&) {
    // The system has no more threads: those there are do the same work.
  }
}

Crew::~Crew() {
  ends_ = true;
  call_.fetch_add(1, std::memory_order_release);
  call_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Crew::run(size_t parts, FunctionRef<void(size_t)> body) {
  if (threads_.empty() || parts < 2) {
    for (size_t part = 0; part < parts; ++part) body(part);
    return;
  }
  body_ = &body;
  parts_ = parts;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<uint32_t>(threads_.size()), std::memory_order_relaxed);
  call_.fetch_add(1, std::memory_order_release);
  call_.notify_all();
  take_parts();
  while (const uint32_t busy = busy_.load(std::memory_order_acquire)) busy_.wait(busy, std::memory_order_acquire);
}

void Crew::serve() {
  for (uint32_t seen = 0;;) {
    call_.wait(seen, std::memory_order_acquire);
    seen = call_.load(std::memory_order_acquire);
    if (ends_) return;
    take_parts();
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_all();
  }
}

void Crew::take_parts() {
  for (size_t part; (part = next_.fetch_add(1, std::memory_order_relaxed)) < parts_;) (*body_)(part);
}

}  // namespace ronde
