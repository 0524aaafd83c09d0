// All-reduce, reduce and reduce-scatter among the ranks of one host.
//
// Small: the values travel inside the announcement, and every rank sums all of them. The announcement is the only
// synchronization.
//
// Symmetric: every rank sees every buffer, so each one reduces its share of the elements and writes the result into all
// buffers, or into the root's. Each byte is read once and written once: half of what copying the buffers would move.
//
// Staged: a window covers one piece per rank. Every rank stages the pieces that others own in its lanes, reduces the
// piece that it owns from its own memory and the others' lanes, writes the result back into all of these lanes, and
// collects the other results from its own lanes. So every lane has one reader at a time, which also writes to it, and
// its cache lines travel quickly (take_over.h). A rank stages window w+1 before it reduces window w; otherwise the
// ranks would alternate between staging and waiting for each other. Input in symmetric memory needs no staging, whereas
// the results, which are private, still pass through the lanes.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "algorithms/chunks.h"
#include "host/host_group.h"
#include "kernels/reduce.h"
#include "system/take_over.h"

namespace ronde {
namespace {

constexpr size_t kPieceAlignment = 64;        // elements; keeps pieces of any type on whole cache lines
constexpr size_t kSmallestPiece = 16 * 1024;  // bytes; below it synchronization costs more than the overlap gains
constexpr size_t kWindowsWanted = 4;          // enough for staging and reducing to overlap

// Elements per piece. If a lane is smaller than kSmallestPiece, the lane decides.
size_t piece_for(size_t count, size_t item_bytes, size_t ranks, size_t lane_bytes) {
  const size_t wanted = std::min(std::max(count * item_bytes / (ranks * kWindowsWanted), kSmallestPiece), lane_bytes);
  return std::max(wanted / item_bytes / kPieceAlignment, size_t{1}) * kPieceAlignment;
}

// The share of rank `index` of `count` elements, which are split among `ranks` ranks at multiples of kPieceAlignment.
Range share_of(size_t count, size_t ranks, size_t index) {
  const size_t lines = (count + kPieceAlignment - 1) / kPieceAlignment;
  const size_t begin = std::min(lines * index / ranks * kPieceAlignment, count);
  const size_t end = std::min(lines * (index + 1) / ranks * kPieceAlignment, count);
  return {begin, end - begin};
}

}  // namespace

void HostGroup::allreduce(const Call& call, const Reduction& reduction, const void* in, void* out, size_t count) {
  reduce_any(call, reduction, in, out, count, -1);
}

void HostGroup::reduce(const Call& call, const Reduction& reduction, const void* in, void* out, size_t count,
                       int root) {
  reduce_any(call, reduction, in, out, count, root);
}

void HostGroup::reduce_any(const Call& call, const Reduction& reduction, const void* in, void* out, size_t count,
                           int only) {
  const size_t bytes = count * reduction.item_bytes();
  if (bytes <= kSmallBytes) {
    exchange_announcements(call, 0, nullptr, in, bytes);
    if (only < 0 || only == index_) reduce_small(reduction, in, out, count, 0, count);
    return;
  }
  const bool wants_result = only < 0 || only == index_;
  const SymmetricSegments::Pin pin(symmetric_);
  const Places places = places_of(in, bytes, out, wants_result ? bytes : 0);
  expose_output(places.out, bytes);
  exchange_announcements(call, 0, &places);
  if (is_symmetric(&Places::in) && is_symmetric(&Places::out)) {
    reduce_symmetric(reduction, count, only);
  } else {
    if (exposure_.announced == announced_) cover_output();  // not that of a call around this one
    reduce_by_lanes(reduction, static_cast<const std::byte*>(in), static_cast<std::byte*>(out), count, only);
  }
}

void HostGroup::reduce_small(const Reduction& reduction, const void* own, void* out, size_t total, size_t begin,
                             size_t count) {
  const size_t item = reduction.item_bytes();
  const void* sources[kMaxLocalSize];
  for (int local = 0; local < size(); ++local) {
    sources[local] = local == index_ ? own : announcement(local).payload(total * item) + begin * item;
  }
  ronde::reduce(reduction, out, sources, size(), count);
  if (size() == 2) take_over(announcement(1 - index_).payload(total * item) + begin * item, count * item);
}

void HostGroup::reduce_symmetric(const Reduction& reduction, size_t count, int only) {
  const Range own = share_of(count, static_cast<size_t>(size()), static_cast<size_t>(index_));
  const size_t offset = own.begin * reduction.item_bytes();
  const size_t bytes = own.count * reduction.item_bytes();
  const std::byte* in[kMaxLocalSize];
  std::byte* out[kMaxLocalSize];
  int out_count = 0;
  for (int local = 0; local < size(); ++local) {
    in[local] = input_of(local, offset, bytes);
    if (only >= 0 && only != local) continue;
    Place place = announcement(local).places.out;
    place.offset += offset;
    out[out_count++] = symmetric_.resolve(place, local, bytes);
  }
  write_in_pieces(bytes, static_cast<size_t>(out_count), [&](size_t begin, size_t piece_bytes) {
    const void* sources[kMaxLocalSize];
    void* destinations[kMaxLocalSize];
    for (int i = 0; i < size(); ++i) sources[i] = in[i] + begin;
    for (int i = 0; i < out_count; ++i) destinations[i] = out[i] + begin;
    reduce_to_all(reduction, destinations, out_count, sources, size(), piece_bytes / reduction.item_bytes());
  });
  finish_symmetric();
}

void HostGroup::reduce_by_lanes(const Reduction& reduction, const std::byte* in, std::byte* out, size_t count,
                                int only) {
  const size_t item = reduction.item_bytes();
  const size_t ranks = static_cast<size_t>(size());
  const size_t piece = piece_for(count, item, ranks, segment_.lane_bytes());
  const size_t window_count = (count + ranks * piece - 1) / (ranks * piece);
  const bool wants_result = only < 0 || only == index_;
  const bool stages = !is_symmetric(&Places::in);

  // The piece of window w that rank p owns.
  const auto piece_of = [&](uint64_t w, int p) {
    const size_t begin = w * ranks * piece;
    const Range share = share_of(std::min(ranks * piece, count - begin), ranks, static_cast<size_t>(p));
    return Range{begin + share.begin, share.count};
  };
  const auto stage = [&](uint64_t w) {
    for (int p = 0; stages && p < size(); ++p) {
      const Range range = piece_of(w, p);
      if (p != index_) std::memcpy(lane(index_, windows_ + w, p), in + range.begin * item, range.count * item);
    }
    publish(&Slot::staged, windows_ + w + 1);
  };
  const auto reduce_own = [&](uint64_t w) {
    const Range range = piece_of(w, index_);
    const void* sources[kMaxLocalSize];
    void* destinations[kMaxLocalSize];
    for (int p = 0; p < size(); ++p) {
      wait_for(&Slot::staged, p, windows_ + w + 1);
      destinations[p] = lane(p, windows_ + w, index_);
      sources[p] = stages ? destinations[p] : input_of(p, range.begin * item, range.count * item);
    }
    sources[index_] = in + range.begin * item;
    if (wants_result) destinations[index_] = out + range.begin * item;  // no rank reads its own lane
    reduce_to_all(reduction, destinations, size(), sources, size(), range.count);
    publish(&Slot::consumed, windows_ + w + 1);
  };
  const auto collect = [&](uint64_t w) {
    for (int step = 1; step < size(); ++step) {
      const int p = (index_ + step) % size();  // the ranks begin at different lanes
      wait_for(&Slot::consumed, p, windows_ + w + 1);
      const Range range = piece_of(w, p);
      if (wants_result) {
        copy_and_take_over(out + range.begin * item, lane(index_, windows_ + w, p), range.count * item);
      }
    }
  };

  // A rank stages window w+2 in the lanes of window w only after it has collected window w from them.
  stage(0);
  for (uint64_t w = 0; w < window_count; ++w) {
    if (w + 1 < window_count) stage(w + 1);
    reduce_own(w);
    collect(w);
  }
  windows_ += window_count;
  if (!stages) {
    check_presence();  // this rank has read inputs of others in place, which they may change after they have left
    ++finished_;
  }
}

void HostGroup::reduce_scatter(const Call& call, const Reduction& reduction, const void* in,
                               std::span<const size_t> counts, void* out) {
  std::vector<size_t> offsets(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), size_t{0});
  reduce_scatter(call, reduction, in, counts, offsets, out);
}

void HostGroup::reduce_scatter(const Call& call, const Reduction& reduction, const void* in,
                               std::span<const size_t> counts, std::span<const size_t> offsets, void* out) {
  const size_t item = reduction.item_bytes();
  const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
  const auto* const from = static_cast<const std::byte*>(in);
  const auto me = static_cast<size_t>(index_);
  if (total * item <= kSmallBytes) {
    const size_t before = std::accumulate(counts.begin(), counts.begin() + index_, size_t{0});
    const std::byte* message = from + offsets.front() * item;
    std::vector<std::byte> packed;
    if (offsets.back() + counts.back() - offsets.front() != total) {
      for (size_t p = 0; p < counts.size(); ++p) {
        packed.insert(packed.end(), from + offsets[p] * item, from + (offsets[p] + counts[p]) * item);
      }
      message = packed.data();
    }
    exchange_announcements(call, 0, nullptr, message, total * item);
    return reduce_small(reduction, from + offsets[me] * item, out, total, before, counts[me]);
  }

  const SymmetricSegments::Pin pin(symmetric_);
  const Places places = places_of(in, (offsets.back() + counts.back()) * item);
  exchange_announcements(call, 0, &places);
  if (!is_symmetric(&Places::in)) {
    reduce_scatter_staged(reduction, from, counts, offsets, static_cast<std::byte*>(out));
    return;
  }
  const void* sources[kMaxLocalSize];
  for (int local = 0; local < size(); ++local) {
    sources[local] = input_of(local, offsets[index_] * item, counts[index_] * item);
  }
  ronde::reduce(reduction, out, sources, size(), counts[index_]);
  finish_symmetric();
}

void HostGroup::reduce_scatter_staged(const Reduction& reduction, const std::byte* in, std::span<const size_t> counts,
                                      std::span<const size_t> offsets, std::byte* out) {
  const size_t item = reduction.item_bytes();
  const size_t piece =
      piece_for(std::accumulate(counts.begin(), counts.end(), size_t{0}), item, counts.size(), segment_.lane_bytes());
  const size_t window_count = (*std::max_element(counts.begin(), counts.end()) + piece - 1) / piece;

  const auto piece_of = [&](uint64_t w, int p) {  // of rank p's chunk
    const size_t begin = std::min(w * piece, counts[p]);
    return Range{begin, std::min(piece, counts[p] - begin)};
  };
  const auto stage = [&](uint64_t w) {
    for (int p = 0; p < size(); ++p) {
      const Range range = piece_of(w, p);
      if (p == index_) continue;
      if (w >= 2) wait_for(&Slot::consumed, p, windows_ + w - 1);
      std::memcpy(lane(index_, windows_ + w, p), in + (offsets[p] + range.begin) * item, range.count * item);
    }
    publish(&Slot::staged, windows_ + w + 1);
  };
  const auto reduce_own = [&](uint64_t w) {
    const Range range = piece_of(w, index_);
    const void* sources[kMaxLocalSize];
    for (int p = 0; p < size(); ++p) {
      wait_for(&Slot::staged, p, windows_ + w + 1);
      sources[p] = p == index_ ? in + (offsets[p] + range.begin) * item : lane(p, windows_ + w, index_);
    }
    ronde::reduce(reduction, out + range.begin * reduction.result_bytes(), sources, size(), range.count);
    for (int p = 0; p < size(); ++p) {
      if (p != index_) take_over(lane(p, windows_ + w, index_), range.count * item);
    }
    publish(&Slot::consumed, windows_ + w + 1);
  };

  if (window_count > 0) stage(0);
  for (uint64_t w = 0; w < window_count; ++w) {
    if (w + 1 < window_count) stage(w + 1);
    reduce_own(w);
  }
  windows_ += window_count;
}

}  // namespace ronde
