// Symmetric memory: segments in which every rank of the host owns a part of the same size, mapped by all of them.
//
// A buffer's *place* is its segment and the offset in its owner's part. If all ranks of a host pass buffers in
// symmetric memory to a collective, every rank accesses the others' buffers directly, without staging.
//
// Ranks create segments collectively and number them in that order, so a number denotes the same segment on every rank.
// Each rank drops a segment when its garbage collector does. So ranks also announce which segments they have, and a
// collective accesses only those that all ranks have: older ones if all ranks announce a place in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "system/inherited.h"
#include "system/mapping.h"

namespace ronde {

struct Place {
  static constexpr uint32_t kNowhere = UINT32_MAX;

  uint64_t offset = 0;
  uint32_t segment = 0;  // 0: private memory; kNowhere: a buffer without bytes
};

// The segments that a rank has, of the newest 64.
struct LiveSegments {
  uint64_t bits = 0;  // bit i: number newest - i
  uint32_t newest = 0;

  bool has(uint32_t number) const {
    return number <= newest && newest - number < 64 && (bits >> (newest - number) & 1);
  }
};

class SymmetricSegments {
 public:
  // Registers a mapping of one part of `part_bytes` per rank, of which number `own` belongs to this rank. Returns the
  // segment's number. All ranks of the communicator must call it in the same order.
  uint32_t add(std::shared_ptr<Mapping> mapping, size_t part_bytes, int own);
  // Takes effect once nothing is pinned.
  void drop(uint32_t number);
  // Gives `bytes` bytes from `place` on in this rank's part, and what else their pages hold, a private copy at the same
  // address. From here on the whole part counts as private memory. Does nothing if this rank has dropped the segment or
  // there is no memory for the copy.
  void make_private(const Place& place, size_t bytes) const;

  // As long as one exists, this rank keeps the segments that it has announced: a thread that drops an array must not
  // unmap memory that another one accesses in a call.
  class Pin {
   public:
    explicit Pin(const SymmetricSegments& segments) : segments_(segments) { segments_.pin(); }
    ~Pin() { segments_.unpin(); }
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;

   private:
    const SymmetricSegments& segments_;
  };

  // True in a forked child, where no member may be accessed, not even by the destructor: the owners leak the object.
  bool is_inherited() const { return fork_origin_.is_inherited(); }
  std::byte* own_part(uint32_t number) const;

  LiveSegments live() const;
  // The place of [data, data + bytes); private memory unless all of it lies in this rank's part of one segment.
  Place place_of(const void* data, size_t bytes) const;
  // The address in this process of `bytes` bytes from `place` on, in the part of local rank `local`; this rank must
  // have the segment. Throws std::out_of_range if they do not lie in the part.
  std::byte* resolve(const Place& place, int local, size_t bytes) const;

 private:
  struct Segment {
    uint32_t number;
    std::shared_ptr<Mapping> mapping;
    size_t part_bytes;
    std::byte* own;
    bool is_dropped = false;
    bool is_private = false;

    bool is_usable() const { return !is_dropped && !is_private; }
  };
  void pin() const;
  void unpin() const;
  const Segment& find(uint32_t number) const;

  ForkOrigin fork_origin_;
  mutable std::mutex mutex_;  // any thread may drop an array
  mutable std::vector<Segment> segments_;
  mutable int pins_ = 0;
  uint32_t next_ = 1;
};

}  // namespace ronde
