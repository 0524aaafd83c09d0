// Symmetric memory: segments in which every rank of the host owns a part of the same size, mapped by all of them.
//
// A buffer's *place* is its segment and the offset in its owner's part. If all ranks of a host pass buffers of the same
// place to a collective, every rank accesses the others' buffers directly, without staging.
//
// Ranks create segments collectively and number them in that order, so a number denotes the same segment on every rank.
// Each rank drops a segment when its garbage collector does. A rank that has dropped one cannot announce a place in it,
// so a collective uses a place only if all ranks announce it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "inherited.h"
#include "mapping.h"

namespace ronde {

struct Place {
  uint64_t offset = 0;
  uint32_t segment = 0;  // 0: private memory
  bool operator==(const Place&) const = default;
};

class SymmetricSegments {
 public:
  // Registers a mapping of one part of `part_bytes` per rank, of which number `own` belongs to this rank. Returns the
  // segment's number. All ranks of the communicator must call it in the same order.
  uint32_t add(std::shared_ptr<Mapping> mapping, size_t part_bytes, int own);
  void drop(uint32_t number);
  // True in a forked child, where no member may be accessed, not even by the destructor: the owners leak the object.
  bool is_inherited() const { return fork_origin_.is_inherited(); }
  std::byte* own_part(uint32_t number) const;

  // The place of [data, data + bytes); private memory unless all of it lies in this rank's part of one segment.
  Place place_of(const void* data, size_t bytes) const;
  // The address in this process of `place` in the part of local rank `local`. The place must come from place_of().
  std::byte* resolve(const Place& place, int local) const;

 private:
  struct Segment {
    uint32_t number;
    std::shared_ptr<Mapping> mapping;
    size_t part_bytes;
    std::byte* own;
  };
  const Segment& find(uint32_t number) const;

  ForkOrigin fork_origin_;
  mutable std::mutex mutex_;  // any thread may drop an array
  std::vector<Segment> segments_;
  uint32_t next_ = 1;
};

}  // namespace ronde
