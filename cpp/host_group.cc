// Announcements and counters, by which the ranks of one host agree and wait. algorithms/in_host_*.cc has the
// operations.
#include "host_group.h"

#include <cstring>
#include <utility>

#include "error.h"

namespace ronde {

HostGroup::HostGroup(const HostSegment& segment, const SymmetricSegments& symmetric, std::vector<int> ranks, int index,
                     std::vector<BellHandle> bell_handles, Waiter& waiter)
    : segment_(segment),
      symmetric_(symmetric),
      ranks_(std::move(ranks)),
      index_(index),
      bell_handles_(std::move(bell_handles)),
      waiter_(waiter) {}

void HostGroup::announce(const Call& call) { exchange_announcements(call, 0, {}, {}, nullptr, 0); }

HostGroup::Buffers HostGroup::announce(const Call& call, const void* in, void* out, size_t bytes) {
  exchange_announcements(call, 0, symmetric_.place_of(in, bytes), symmetric_.place_of(out, bytes), nullptr, 0);
  Buffers buffers;
  for (int local = 0; is_symmetric_in_and_out() && local < size(); ++local) {
    buffers.in.push_back(symmetric_.resolve(announcement(local).in, local));
    buffers.out.push_back(symmetric_.resolve(announcement(local).out, local));
  }
  return buffers;
}

void HostGroup::exchange(const Call& call, uint64_t value, std::span<uint64_t> values) {
  exchange_announcements(call, value, {}, {}, nullptr, 0);
  for (int local = 0; local < size(); ++local) values[local] = announcement(local).value;
}

void HostGroup::exchange_announcements(const Call& call, uint64_t value, Place in, Place out, const void* small,
                                       size_t small_bytes) {
  ++announced_;
  Announcement& own = announcement(index_);
  own.call = call;
  own.value = value;
  if (small_bytes > 0) {
    std::memcpy(own.payload(small_bytes), small, small_bytes);
  } else {
    own.in = in;
    own.out = out;
  }
  own.number.store(announced_, std::memory_order_release);
  ring_all();
  int next = 0;
  waiter_.until([&] {
    while (next < size() && announcement(next).number.load(std::memory_order_acquire) >= announced_) ++next;
    return next == size();
  });
  compare_calls();
}

// Every rank compares all calls with the first rank's, so that all ranks get the same result.
void HostGroup::compare_calls() const {
  const Call& first = announcement(0).call;
  for (int local = 1; local < size(); ++local) {
    const Call& other = announcement(local).call;
    if (other != first) [[unlikely]] {
      throw MismatchError(describe_mismatch(ranks_[0], first, ranks_[local], other));
    }
  }
}

bool HostGroup::is_symmetric_in() const {
  const Place in = announcement(0).in;
  if (in.segment == 0) return false;
  for (int local = 1; local < size(); ++local) {
    if (announcement(local).in != in) return false;
  }
  return true;
}

bool HostGroup::is_symmetric_in_and_out() const {
  const Place out = announcement(0).out;
  if (out.segment == 0 || !is_symmetric_in()) return false;
  for (int local = 1; local < size(); ++local) {
    if (announcement(local).out != out) return false;
  }
  return true;
}

std::vector<int> HostGroup::missing() const {
  std::vector<int> ranks;
  for (int local = 0; local < size(); ++local) {
    if (announcement(local).number.load(std::memory_order_acquire) < announced_) ranks.push_back(ranks_[local]);
  }
  const bool waits_inside = awaited_.word != nullptr && awaited_.word->load() < awaited_.value;
  if (ranks.empty() && waits_inside) ranks.push_back(awaited_.rank);
  return ranks;
}

void HostGroup::publish(Counter counter, uint64_t value) {
  (segment_.slot(index_).*counter).store(value, std::memory_order_release);
  ring_all();
}

void HostGroup::ring_all() {
  BellHandle::publish_before_ringing();
  for (int local = 0; local < size(); ++local) {
    if (local != index_) bell_handles_[local].ring_after_publishing();
  }
}

void HostGroup::wait_for(Counter counter, int local, uint64_t value) {
  const std::atomic<uint64_t>& word = segment_.slot(local).*counter;
  if (word.load(std::memory_order_acquire) >= value) return;
  awaited_ = {&word, value, ranks_[local]};
  waiter_.until([&] { return word.load(std::memory_order_acquire) >= value; });
}

void HostGroup::wait_for_all(Counter counter, uint64_t value) {
  for (int local = 0; local < size(); ++local) wait_for(counter, local, value);
}

// Symmetric buffers belong to the caller again once no rank accesses them.
void HostGroup::finish_symmetric() {
  publish(&Slot::finished, ++finished_);
  wait_for_all(&Slot::finished, finished_);
}

}  // namespace ronde
