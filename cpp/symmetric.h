// Symmetric memory: segments in which every rank of the host owns a part of the same size, mapped by all of them.
//
// A buffer's *place* is the segment and the offset inside its owner's part. If all ranks of a host pass buffers of the
// same place to a collective, every rank can reach every other rank's buffer directly and nothing is staged.
// Segments are made collectively and numbered in that order, so a number means the same on every rank. They are dropped
// one by one whenever a rank's garbage collector likes; a rank that has dropped one cannot announce its place any more,
// which is why a place counts only when all ranks announce it.
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
  // Registers a mapping that holds `parts` parts of `part_bytes`, of which `own` belongs to this rank; returns its
  // number. All ranks of the communicator call it in the same order.
  uint32_t add(std::shared_ptr<Mapping> mapping, size_t part_bytes, int own);
  void drop(uint32_t number);
  // In a forked child, where nothing here may be touched, not even to destroy it: its owners let it leak.
  bool is_inherited() const { return birthplace_.is_inherited(); }
  std::byte* own_part(uint32_t number) const;

  // Where [data, data + bytes) lies; private memory unless it lies in this rank's part of a segment as a whole.
  Place place_of(const void* data, size_t bytes) const;
  // The address here of `place` in the part of the host's rank `local`. The place must come from place_of().
  std::byte* resolve(const Place& place, int local) const;

 private:
  struct Segment {
    uint32_t number;
    std::shared_ptr<Mapping> mapping;
    size_t part_bytes;
    std::byte* own;
  };
  const Segment& find(uint32_t number) const;

  Birthplace birthplace_;
  mutable std::mutex mutex_;  // arrays are dropped by any thread
  std::vector<Segment> segments_;
  uint32_t next_ = 1;
};

}  // namespace ronde
