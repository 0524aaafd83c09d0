#include "host/host_segment.h"

#include <algorithm>
#include <utility>

namespace ronde {
namespace {

constexpr size_t kPage = 4096;

constexpr size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

constexpr size_t slot_stride() { return round_up(sizeof(Slot), kPage); }

size_t lane_bytes_for(int local_size, size_t staging_bytes) {
  return std::max(kSmallBytes, round_up(staging_bytes * 2 / std::max(local_size, 2), kPage));
}

size_t lanes_per_rank(int local_size) { return 2 * static_cast<size_t>(local_size); }

size_t pipe_stride() { return round_up(ShmPipe::bytes(), kPage); }

}  // namespace

size_t HostSegment::bytes(int local_size, size_t staging_bytes) {
  const size_t ranks = static_cast<size_t>(local_size);
  return ranks * slot_stride() + ranks * lanes_per_rank(local_size) * lane_bytes_for(local_size, staging_bytes) +
         ranks * ranks * pipe_stride();
}

HostSegment::HostSegment(std::shared_ptr<Mapping> memory, int local_size, size_t staging_bytes)
    : size_(local_size), lane_bytes_(lane_bytes_for(local_size, staging_bytes)), memory_(std::move(memory)) {}

Slot& HostSegment::slot(int local) const {
  // The constructors of its atomics would also leave zeros.
  return *reinterpret_cast<Slot*>(memory_->data() + static_cast<size_t>(local) * slot_stride());
}

std::byte* HostSegment::lane(int writer, uint64_t parity, int reader) const {
  const size_t index = static_cast<size_t>(writer) * lanes_per_rank(size_) + (parity & 1) * static_cast<size_t>(size_) +
                       static_cast<size_t>(reader);
  return memory_->data() + static_cast<size_t>(size_) * slot_stride() + index * lane_bytes_;
}

ShmPipe* HostSegment::pipe(int from, int to) const {
  const size_t ranks = static_cast<size_t>(size_);
  const size_t index = static_cast<size_t>(from) * ranks + static_cast<size_t>(to);
  return reinterpret_cast<ShmPipe*>(memory_->data() + ranks * slot_stride() +
                                    ranks * lanes_per_rank(size_) * lane_bytes_ + index * pipe_stride());
}

}  // namespace ronde
