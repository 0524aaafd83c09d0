#include "waiting/stall_hub.h"

#include <chrono>

#include "system/block_signals.h"

namespace ronde {

std::optional<std::vector<StallHub::Event>> StallHub::next_events(int64_t at_ns) {
  const BlockSignals block;
  std::unique_lock lock(mutex_);
  const auto over = [&] { return stopping_ || is_woken_ || !events_.empty(); };
  if (at_ns < 0) {
    happened_.wait(lock, over);
  } else {
    happened_.wait_until(lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(at_ns)), over);
  }
  is_woken_ = false;
  if (stopping_) return std::nullopt;
  return std::exchange(events_, {});
}

void StallHub::stop() {
  std::lock_guard lock(mutex_);
  stopping_ = true;
  happened_.notify_all();
}

void StallHub::wake() {
  std::lock_guard lock(mutex_);
  is_woken_ = true;
  happened_.notify_all();
}

void StallHub::push(Event event) {
  std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
  happened_.notify_all();
}

uint32_t StallHub::join(const std::string& label, Waits* waits) {
  std::lock_guard lock(members_mutex_);
  members_[++joined_] = {hash_of(label), waits};
  return joined_;
}

void StallHub::leave(uint32_t member) {
  std::lock_guard lock(members_mutex_);
  members_.erase(member);
}

std::pair<StallHub::Blocked, std::string> StallHub::blocked() {
  std::pair<Blocked, std::string> found;
  int64_t since_ns = INT64_MAX;
  std::lock_guard lock(members_mutex_);
  for (const auto& entry : members_) {
    const Member& member = entry.second;  // clang 15 has no lambdas that capture structured bindings
    member.waits->visit([&](const Waits::Item& item) {
      if (!item.is_awaited || item.is_running || item.since_ns >= since_ns) return;
      since_ns = item.since_ns;
      found = {{member.where, item.id, item.since_ns}, member.waits->describe(item)};
    });
  }
  return found;
}

bool StallHub::lacks(uint64_t where, uint64_t id) {
  std::lock_guard lock(members_mutex_);
  for (const auto& [_, member] : members_) {
    if (member.where == where) return !member.waits->have_begun({&id, 1}).front();
  }
  return false;
}

void StallHub::use_stacks(const StackTaker& taker, std::string preface) {
  std::lock_guard lock(mutex_);
  taker_ = taker;
  preface_ = std::move(preface);
}

std::pair<StackTaker, std::string> StallHub::stacks() {
  std::lock_guard lock(mutex_);
  return {taker_, preface_};
}

}  // namespace ronde
