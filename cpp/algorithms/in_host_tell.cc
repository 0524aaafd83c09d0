// The first step of collectives whose sizes not every rank knows, among the ranks of one host: it tells the sizes.
//
// The ranks need a meeting for that, and small blocks travel along in the announcements. If those of all ranks fit,
// they are *carried*: the second step only copies them out of the announcements. All ranks see the same sizes and so
// agree on whether there is another meeting.
//
// The messages, at most kSmallBytes long, by operation:
//   gather, all-gather   the rank's rows; the announcement's value is their number
//   all-to-all           for each rank a Split, then the rows for the other ranks; the value is the length of it all
//   scatter, of the root the number of words, the words, then the rows for the other ranks; the value is the same
#include <algorithm>
#include <numeric>

#include "host_group.h"
#include "take_over.h"

namespace ronde {
namespace {

// What one rank sends to another: so many rows, which lie at this offset of the message.
struct Split {
  uint64_t rows;
  uint64_t offset;
};
static_assert(kMaxLocalSize * sizeof(Split) <= kSmallBytes);

}  // namespace

void HostGroup::take(std::byte* message, size_t bytes, std::byte* to) const {
  move_bytes(to, message, bytes);
  if (size() == 2) take_over(message, bytes);
}

void HostGroup::tell_rows(const Call& call, const void* in, uint64_t rows, size_t row_bytes,
                          std::span<uint64_t> rows_of_ranks) {
  const size_t bytes = rows * row_bytes;
  exchange_announcements(call, rows, nullptr, in, bytes <= kSmallBytes ? bytes : 0);
  for (int p = 0; p < size(); ++p) rows_of_ranks[p] = announcement(p).value;
  are_carried_ = *std::ranges::max_element(rows_of_ranks) * row_bytes <= kSmallBytes;
}

void HostGroup::take_rows(const void* in, void* out, const Parts& parts, int reader) {
  if (reader >= 0 && reader != index_) return;
  auto* const to = static_cast<std::byte*>(out);
  move_bytes(to + parts.offsets[index_], static_cast<const std::byte*>(in), parts.sizes[index_]);
  for (int p = 0; p < size(); ++p) {
    if (p != index_) take(announcement(p).payload(parts.sizes[p]), parts.sizes[p], to + parts.offsets[p]);
  }
}

void HostGroup::tell_splits(const Call& call, const void* in, std::span<const uint64_t> rows, size_t row_bytes,
                            std::span<uint64_t> arriving) {
  std::byte* const message = next_message();
  auto* const splits = reinterpret_cast<Split*>(message);
  size_t length = sizeof(Split) * static_cast<size_t>(size());
  for (int p = 0; p < size(); ++p) {
    splits[p] = {rows[p], length};
    if (p != index_) length += rows[p] * row_bytes;
  }
  if (length <= kSmallBytes) {
    const auto* from = static_cast<const std::byte*>(in);
    for (int p = 0; p < size(); ++p) {
      if (p != index_) move_bytes(message + splits[p].offset, from, rows[p] * row_bytes);
      from += rows[p] * row_bytes;
    }
  }
  exchange_announcements(call, length);
  are_carried_ = true;
  for (int p = 0; p < size(); ++p) {
    arriving[p] = reinterpret_cast<const Split*>(announcement(p).small)[index_].rows;
    are_carried_ = are_carried_ && announcement(p).value <= kSmallBytes;
  }
}

void HostGroup::take_splits(const void* in, const Parts& from, void* out, const Parts& to) {
  auto* const target = static_cast<std::byte*>(out);
  move_bytes(target + to.offsets[index_], static_cast<const std::byte*>(in) + from.offsets[index_], to.sizes[index_]);
  for (int p = 0; p < size(); ++p) {
    if (p == index_) continue;
    const Split split = reinterpret_cast<const Split*>(announcement(p).small)[index_];
    take(announcement(p).small + split.offset, to.sizes[p], target + to.offsets[p]);
  }
}

void HostGroup::tell_words(const Call& call, std::vector<int64_t>& words, const void* in,
                           std::span<const size_t> sizes) {
  const int root = call.root;
  size_t length = 0;
  if (index_ == root) {
    auto* const message = reinterpret_cast<int64_t*>(next_message());
    message[0] = static_cast<int64_t>(words.size());
    std::ranges::copy(words, message + 1);
    const size_t head = (1 + words.size()) * sizeof(int64_t);
    length = std::accumulate(sizes.begin(), sizes.end(), head) - sizes[root];
    if (length <= kSmallBytes) {
      const auto* const from = static_cast<const std::byte*>(in);
      const size_t before = std::accumulate(sizes.begin(), sizes.begin() + root, size_t{0});
      std::byte* const blocks = next_message() + head;
      move_bytes(blocks, from, before);
      move_bytes(blocks + before, from + before + sizes[root], length - head - before);
    }
  }
  exchange_announcements(call, length);
  const auto* const told = reinterpret_cast<const int64_t*>(announcement(root).small);
  if (index_ != root) words.assign(told + 1, told + 1 + told[0]);
  are_carried_ = announcement(root).value <= kSmallBytes;
}

void HostGroup::take_block(int root, const void* in, std::span<const size_t> sizes, void* out) {
  const size_t before = std::accumulate(sizes.begin(), sizes.begin() + index_, size_t{0});
  auto* const to = static_cast<std::byte*>(out);
  if (index_ == root) return move_bytes(to, static_cast<const std::byte*>(in) + before, sizes[index_]);
  std::byte* const message = announcement(root).small;
  const size_t head = (1 + static_cast<size_t>(*reinterpret_cast<const int64_t*>(message))) * sizeof(int64_t);
  take(message + head + before - (root < index_ ? sizes[root] : 0), sizes[index_], to);
}

}  // namespace ronde
