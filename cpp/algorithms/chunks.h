// The division of a buffer: one chunk of elements per rank, many segments per chunk.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace ronde {

struct Range {
  size_t begin;
  size_t count;
};

class Chunks {
 public:
  // `count` elements in `ranks` chunks whose sizes differ by at most one.
  static Chunks even(size_t count, int ranks) {
    Chunks chunks;
    const size_t parts = static_cast<size_t>(ranks);
    for (size_t rank = 0; rank < parts; ++rank) chunks.append(count / parts + (rank < count % parts ? 1 : 0));
    return chunks;
  }

  // One chunk per entry of `counts`, one behind the other.
  static Chunks of(std::span<const size_t> counts) {
    Chunks chunks;
    for (const size_t count : counts) chunks.append(count);
    return chunks;
  }

  Range operator[](int rank) const { return {ends_[rank], ends_[rank + 1] - ends_[rank]}; }
  size_t total() const { return ends_.back(); }

  // Segment number `segment` of a rank's chunk; empty past its end.
  Range segment(int rank, size_t segment, size_t segment_count) const {
    const Range chunk = (*this)[rank];
    const size_t begin = std::min(chunk.count, segment * segment_count);
    return {chunk.begin + begin, std::min(chunk.count - begin, segment_count)};
  }

  // All segments of a rank's chunk. An empty chunk has one empty segment.
  std::vector<Range> segments(int rank, size_t segment_count) const {
    std::vector<Range> all{segment(rank, 0, segment_count)};
    while (all.size() * segment_count < (*this)[rank].count) all.push_back(segment(rank, all.size(), segment_count));
    return all;
  }

 private:
  void append(size_t count) { ends_.push_back(ends_.back() + count); }

  std::vector<size_t> ends_{0};  // chunk `rank` is [ends_[rank], ends_[rank + 1])
};

}  // namespace ronde
