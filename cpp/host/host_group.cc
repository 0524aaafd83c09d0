// Announcements and counters, by which the ranks of one host agree and wait. algorithms/in_host_*.cc has the
// operations.
#include "host/host_group.h"

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/steady_clock.h"

namespace ronde {
namespace {

// Much longer than a rank that runs needs to leave a failed call, also where many processes share a core.
constexpr int64_t kDepartureNs = 1'000'000'000;

}  // namespace

HostGroup::HostGroup(const HostSegment& segment, const SymmetricSegments& symmetric, std::vector<int> ranks, int index,
                     std::vector<BellHandle> bell_handles, Waiter& waiter)
    : segment_(segment),
      symmetric_(symmetric),
      ranks_(std::move(ranks)),
      index_(index),
      bell_handles_(std::move(bell_handles)),
      waiter_(waiter) {}

template <class Step>
void HostGroup::wait_until(Step&& step) {
  // Only this thread begins messages, so none begins during the wait.
  if (links_ == nullptr || !links_->is_pending()) return waiter_.until(step);
  if (!waiter_.spin(step)) links_->wait_until(step);
}

void HostGroup::announce(const Call& call) { exchange_announcements(call, 0); }

HostGroup::Buffers HostGroup::announce(const Call& call, const void* in, void* out, size_t bytes) {
  Buffers buffers;
  buffers.pin = std::make_unique<SymmetricSegments::Pin>(symmetric_);
  const Places places = places_of(in, bytes, out, bytes);
  expose_output(places.out, bytes);
  exchange_announcements(call, 0, &places);
  const bool are_symmetric = is_symmetric(&Places::in) && is_symmetric(&Places::out);
  if (!are_symmetric) cover_output();
  for (int local = 0; are_symmetric && local < size(); ++local) {
    buffers.in.push_back(input_of(local, 0, bytes));
    buffers.out.push_back(symmetric_.resolve(announcement(local).places.out, local, bytes));
  }
  return buffers;
}

void HostGroup::exchange(const Call& call, uint64_t value, std::span<uint64_t> values) {
  exchange_announcements(call, value);
  for (int local = 0; local < size(); ++local) values[local] = announcement(local).value;
}

void HostGroup::exchange_announcements(const Call& call, uint64_t value, const Places* places, const void* small,
                                       size_t small_bytes) {
  ++announced_;
  are_carried_ = false;
  Announcement& own = announcement(index_);
  own.call = call;
  own.value = value;
  if (small_bytes > 0) std::memcpy(own.payload(small_bytes), small, small_bytes);
  if (places != nullptr) own.places = *places;
  own.number.store(announced_, std::memory_order_release);
  ring_all();
  int next = 0;
  wait_until([&] {
    while (next < size() && announcement(next).number.load(std::memory_order_acquire) >= announced_) ++next;
    return next == size();
  });
  compare_calls();
}

// Every rank compares all calls with the first rank's, so that all ranks get the same result.
void HostGroup::compare_calls() {
  const Call& first = announcement(0).call;
  for (int local = 1; local < size(); ++local) {
    const Call& other = announcement(local).call;
    if (other != first) [[unlikely]] {
      cover_output();  // no rank goes on with the call
      throw MismatchError(describe_mismatch(ranks_[0], first, ranks_[local], other));
    }
  }
}

Places HostGroup::places_of(const void* in, size_t in_bytes, const void* out, size_t out_bytes) const {
  return {symmetric_.place_of(in, in_bytes), symmetric_.place_of(out, out_bytes), symmetric_.live()};
}

bool HostGroup::is_symmetric(Place Places::* buffer) const {
  LiveSegments common = announcement(0).places.live;
  for (int local = 1; local < size(); ++local) {
    const LiveSegments& live = announcement(local).places.live;
    common.bits &= live.newest == common.newest ? live.bits : 0;  // another thread of a rank is creating one
  }
  const auto segment_of = [&](int local) { return (announcement(local).places.*buffer).segment; };
  const uint32_t first = segment_of(0);
  bool are_equal = first != 0 && first != Place::kNowhere;
  bool are_known = true, are_empty = true;
  for (int local = 0; local < size(); ++local) {
    const uint32_t segment = segment_of(local);
    are_equal = are_equal && segment == first;
    are_known = are_known && (segment == Place::kNowhere || common.has(segment));
    are_empty = are_empty && segment == Place::kNowhere;
  }
  return !are_empty && (are_equal || are_known);
}

const std::byte* HostGroup::input_of(int local, size_t offset, size_t bytes) const {
  Place place = announcement(local).places.in;
  place.offset += offset;
  return symmetric_.resolve(place, local, bytes);
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
  wait_until([&] { return word.load(std::memory_order_acquire) >= value; });
}

void HostGroup::wait_for_all(Counter counter, uint64_t value) {
  for (int local = 0; local < size(); ++local) wait_for(counter, local, value);
}

// Symmetric buffers belong to the caller again once no rank accesses them.
void HostGroup::finish_symmetric() {
  publish(&Slot::finished, finished_ + 1);
  wait_for_all(&Slot::finished, finished_ + 1);
  // A rank may have left after it had published this, and changed its buffer while this rank still read it.
  check_presence();
  ++finished_;
  cover_output();
}

// --- Failed calls ----------------------------------------------------------------------------------------------------

void HostGroup::expose_output(const Place& out, size_t bytes) {
  if (out.segment != 0 && out.segment != Place::kNowhere) exposure_ = {announced_ + 1, out, bytes};
}

// Between the announcement of this rank and this check is the fence of ring_all(). It also is between `left` and the
// looks at announcements of a rank that leaves. So either this rank sees that the other one has left, or the other one
// sees that this rank may write. The fence here orders the check after this rank's reads of other buffers.
void HostGroup::check_presence() const {
  std::atomic_thread_fence(std::memory_order_acquire);
  for (int local = 0; local < size(); ++local) {
    const uint64_t left = segment_.slot(local).left.load(std::memory_order_relaxed);
    if (left == 0 || left > finished_ + 1) [[likely]] {
      continue;
    }
    const int rank = ranks_[local];
    throw Failure(FailureKind::kPeerLost, rank, "rank " + std::to_string(rank) + " has left a call that failed");
  }
}

void HostGroup::leave() {
  segment_.slot(index_).left.store(finished_ + 1, std::memory_order_release);
  ring_all();
}

bool HostGroup::may_write(int local) const {
  const Slot& slot = segment_.slot(local);
  const Announcement& told = slot.announcements[exposure_.announced & 1];
  return local != index_ && told.number.load(std::memory_order_acquire) >= exposure_.announced &&
         slot.finished.load(std::memory_order_acquire) <= finished_ && slot.left.load(std::memory_order_acquire) == 0;
}

void HostGroup::take_back_output(FunctionRef<bool(int)> has_gone) {
  if (exposure_.announced == 0) return;
  const int64_t end_ns = steady_now_ns() + kDepartureNs;
  for (int local = 0; local < size(); ++local) {
    while (may_write(local) && !has_gone(ranks_[local])) {
      if (steady_now_ns() > end_ns) {
        symmetric_.make_private(exposure_.out, exposure_.bytes);
        return cover_output();
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  cover_output();
}

}  // namespace ronde
