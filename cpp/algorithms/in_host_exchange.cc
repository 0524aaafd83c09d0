// Collectives among the ranks of one host that move bytes without arithmetic: share (all-gather, broadcast, gather) and
// deal (all-to-all, scatter).
//
// Small: the bytes travel inside the announcement. In a deal each rank decides for the blocks that it sends.
//
// Symmetric: every rank copies its bytes out of the others' buffers.
//
// Staged. Share: each rank fills its lanes, all of them as one area, with the next window of its bytes, and every other
// rank (or the one reader) copies the window out. Deal: the same with one lane per reader.
#include <algorithm>
#include <cstring>
#include <vector>

#include "host/host_group.h"
#include "system/take_over.h"

namespace ronde {
namespace {

struct Window {
  size_t begin, bytes;
};

Window window_of(uint64_t w, size_t window_bytes, size_t total) {
  const size_t begin = std::min(w * window_bytes, total);
  return {begin, std::min(window_bytes, total - begin)};
}

// Enough windows to overlap filling and reading; none larger than the lane, none so small that synchronization
// dominates.
size_t window_bytes_for(size_t largest, size_t room) {
  constexpr size_t kSmallest = 16 * 1024;
  constexpr size_t kWindowsWanted = 4;
  return std::min(std::max((largest / kWindowsWanted + kLine - 1) / kLine * kLine, kSmallest), room);
}

// The number of bytes from the beginning of the buffer to the end of the last part.
size_t end_of(const Parts& parts) {
  size_t end = 0;
  for (size_t p = 0; p < parts.sizes.size(); ++p) {
    if (parts.sizes[p] > 0) end = std::max(end, parts.offsets[p] + parts.sizes[p]);
  }
  return end;
}

}  // namespace

void HostGroup::share(const Call& call, const void* in, void* out, const Parts& parts, int reader) {
  const size_t largest = *std::max_element(parts.sizes.begin(), parts.sizes.end());
  const auto* from = static_cast<const std::byte*>(in);
  auto* to = static_cast<std::byte*>(out);
  const bool reads = reader < 0 || reader == index_;
  if (reads) move_bytes(to + parts.offsets[index_], from, parts.sizes[index_]);

  if (largest <= kSmallBytes) {
    exchange_announcements(call, 0, nullptr, in, parts.sizes[index_]);
    for (int p = 0; reads && p < size(); ++p) {
      if (p == index_ || parts.sizes[p] == 0) continue;
      std::byte* const payload = announcement(p).payload(parts.sizes[p]);
      std::memcpy(to + parts.offsets[p], payload, parts.sizes[p]);
      if (size() == 2) take_over(payload, parts.sizes[p]);
    }
    return;
  }
  const SymmetricSegments::Pin pin(symmetric_);
  const Places places = places_of(in, parts.sizes[index_]);
  exchange_announcements(call, 0, &places);
  if (is_symmetric(&Places::in)) {
    share_symmetric(to, parts, reader);
  } else {
    share_staged(from, to, parts, reader);
  }
}

void HostGroup::share_symmetric(std::byte* out, const Parts& parts, int reader) {
  const bool reads = reader < 0 || reader == index_;
  for (int step = 1; reads && step < size(); ++step) {
    const int p = (index_ + step) % size();
    if (parts.sizes[p] == 0) continue;
    std::memcpy(out + parts.offsets[p], input_of(p, 0, parts.sizes[p]), parts.sizes[p]);
  }
  finish_symmetric();
}

void HostGroup::share_staged(const std::byte* in, std::byte* out, const Parts& parts, int reader) {
  const bool reads = reader < 0 || reader == index_;
  const bool is_sole_reader = reader >= 0 || size() == 2;
  const size_t largest = *std::max_element(parts.sizes.begin(), parts.sizes.end());
  const size_t window_bytes = window_bytes_for(largest, static_cast<size_t>(size()) * segment_.lane_bytes());
  const size_t window_count = (largest + window_bytes - 1) / window_bytes;

  const auto fill = [&](uint64_t w) {
    const Window window = window_of(w, window_bytes, parts.sizes[index_]);
    for (int p = 0; w >= 2 && window.bytes > 0 && p < size(); ++p) {
      if (p != index_ && (reader < 0 || reader == p)) wait_for(&Slot::consumed, p, windows_ + w - 1);
    }
    if (window.bytes > 0) std::memcpy(lane(index_, windows_ + w, 0), in + window.begin, window.bytes);
    publish(&Slot::staged, windows_ + w + 1);
  };
  const auto read = [&](uint64_t w) {
    for (int step = 1; reads && step < size(); ++step) {
      const int p = (index_ + step) % size();
      const Window window = window_of(w, window_bytes, parts.sizes[p]);
      if (window.bytes == 0) continue;
      wait_for(&Slot::staged, p, windows_ + w + 1);
      std::byte* const staged = lane(p, windows_ + w, 0);
      if (is_sole_reader) {
        copy_and_take_over(out + parts.offsets[p] + window.begin, staged, window.bytes);
      } else {
        std::memcpy(out + parts.offsets[p] + window.begin, staged, window.bytes);
      }
    }
    publish(&Slot::consumed, windows_ + w + 1);
  };

  fill(0);
  for (uint64_t w = 0; w < window_count; ++w) {
    if (w + 1 < window_count) fill(w + 1);
    read(w);
  }
  windows_ += window_count;
}

void HostGroup::deal(const Call& call, const void* in, const Parts& from, void* out, const Parts& to) {
  // No rank knows all sizes, but all ranks must pass the same number of windows. So each announces its largest size.
  const auto* source = static_cast<const std::byte*>(in);
  auto* target = static_cast<std::byte*>(out);
  size_t own_largest = 0;
  for (int p = 0; p < size(); ++p) {
    if (p != index_) own_largest = std::max(own_largest, from.sizes[p]);
  }
  const SymmetricSegments::Pin pin(symmetric_);
  const bool is_small = own_largest <= small_block_bytes();
  if (is_small) {
    const Places places = places_of(nullptr, 0);
    std::byte blocks[kSmallBytes];
    for (int p = 0; p < size(); ++p) {
      if (p == index_ || from.sizes[p] == 0) continue;
      std::memcpy(blocks + small_block_index(index_, p) * own_largest, source + from.offsets[p], from.sizes[p]);
    }
    exchange_announcements(call, own_largest, &places, blocks, small_payload_bytes(own_largest));
  } else {
    // It also announces where its blocks begin, because a rank that reads them knows only its places.
    const Places places = places_of(in, end_of(from));
    exchange_announcements(call, own_largest, &places, from.offsets.data(), from.offsets.size_bytes());
  }
  if (to.sizes[index_] > 0) move_bytes(target + to.offsets[index_], source + from.offsets[index_], to.sizes[index_]);

  size_t largest = 0;  // of the ranks whose blocks are not in their announcements
  for (int p = 0; p < size(); ++p) {
    const size_t theirs = announcement(p).value;
    if (theirs > small_block_bytes()) {
      largest = std::max(largest, theirs);
    } else if (p != index_ && to.sizes[p] > 0) {
      std::byte* const block =
          announcement(p).payload(small_payload_bytes(theirs)) + small_block_index(p, index_) * theirs;
      std::memcpy(target + to.offsets[p], block, std::min(to.sizes[p], theirs));
      if (size() == 2) take_over(block, theirs);
    }
  }
  if (largest == 0) return;
  std::vector<size_t> sending(from.sizes.begin(), from.sizes.end()), arriving(to.sizes.begin(), to.sizes.end());
  if (is_small) std::fill(sending.begin(), sending.end(), 0);
  for (int p = 0; p < size(); ++p) {
    if (announcement(p).value <= small_block_bytes()) arriving[p] = 0;
  }
  if (is_symmetric(&Places::in)) {
    deal_symmetric(target, {arriving, to.offsets});
  } else {
    deal_staged(source, {sending, from.offsets}, target, {arriving, to.offsets}, largest);
  }
}

void HostGroup::deal_symmetric(std::byte* out, const Parts& to) {
  for (int step = 1; step < size(); ++step) {
    const int p = (index_ + step) % size();
    if (to.sizes[p] == 0) continue;
    const auto* offsets = reinterpret_cast<const size_t*>(announcement(p).payload(to.sizes.size_bytes()));
    std::memcpy(out + to.offsets[p], input_of(p, offsets[index_], to.sizes[p]), to.sizes[p]);
  }
  finish_symmetric();
}

void HostGroup::deal_staged(const std::byte* in, const Parts& from, std::byte* out, const Parts& to, size_t largest) {
  const size_t window_bytes = window_bytes_for(largest, segment_.lane_bytes());
  const size_t window_count = (largest + window_bytes - 1) / window_bytes;

  const auto fill = [&](uint64_t w) {
    for (int p = 0; p < size(); ++p) {
      const Window window = window_of(w, window_bytes, from.sizes[p]);
      if (p == index_ || window.bytes == 0) continue;
      if (w >= 2) wait_for(&Slot::consumed, p, windows_ + w - 1);
      std::memcpy(lane(index_, windows_ + w, p), in + from.offsets[p] + window.begin, window.bytes);
    }
    publish(&Slot::staged, windows_ + w + 1);
  };
  const auto read = [&](uint64_t w) {
    for (int step = 1; step < size(); ++step) {
      const int p = (index_ + step) % size();
      const Window window = window_of(w, window_bytes, to.sizes[p]);
      if (window.bytes == 0) continue;
      wait_for(&Slot::staged, p, windows_ + w + 1);
      copy_and_take_over(out + to.offsets[p] + window.begin, lane(p, windows_ + w, index_), window.bytes);
    }
    publish(&Slot::consumed, windows_ + w + 1);
  };

  fill(0);
  for (uint64_t w = 0; w < window_count; ++w) {
    if (w + 1 < window_count) fill(w + 1);
    read(w);
  }
  windows_ += window_count;
}

}  // namespace ronde
