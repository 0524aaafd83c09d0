// Threads as the ranks of one host, without a communicator.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"
#include "host/host_group.h"
#include "host/host_segment.h"

namespace ronde::testing {

using GroupProgram = std::function<void(HostGroup&, SymmetricSegments&)>;

inline std::shared_ptr<Mapping> memory_of(size_t bytes) {
  const int fd = memfd_create("test", MFD_CLOEXEC);
  CHECK(ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  return std::make_shared<Mapping>(fd, bytes);
}

// Returns whether anything has passed through staging lanes.
inline bool run(int size, size_t staging_bytes, const GroupProgram& program, FailureState& failure) {
  HostSegment segment(memory_of(HostSegment::bytes(size, staging_bytes)), size, staging_bytes);
  std::vector<SymmetricSegments> symmetric(static_cast<size_t>(size));
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<BellHandle> bell_handles;
  for (int rank = 0; rank < size; ++rank) bell_handles.emplace_back(&segment.slot(rank).bell);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Waiter waiter(bell_handles[static_cast<size_t>(rank)], failure, {.spins = 4});
      SymmetricSegments& mine = symmetric[static_cast<size_t>(rank)];
      HostGroup group(segment, mine, ranks, rank, bell_handles, waiter);
      program(group, mine);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::byte* const lanes = segment.lane(0, 0, 0);
  const std::byte* const end = segment.lane(size, 0, 0);
  return std::any_of(lanes, end, [](std::byte each) { return each != std::byte{0}; });
}

inline bool run(int size, size_t staging_bytes, const GroupProgram& program) {
  FailureState failure;
  return run(size, staging_bytes, program, failure);
}

inline Call call_of(Kind kind, size_t count) {
  Call call;
  call.kind = kind;
  call.dtype = DType::kFloat32;
  call.count = count;
  return call;
}

}  // namespace ronde::testing
