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
//
// What another rank has told is checked before it is used as a count or an offset.
#include <algorithm>
#include <numeric>
#include <string>

#include "base/error.h"
#include "host/host_group.h"
#include "system/take_over.h"

namespace ronde {
namespace {

// What one rank sends to another: so many rows, which lie at this offset of the message.
struct Split {
  uint64_t rows;
  uint64_t offset;
};
static_assert(kMaxLocalSize * sizeof(Split) <= kSmallBytes);
static_assert((1 + HostGroup::kMostWords) * sizeof(int64_t) <= kSmallBytes);

}  // namespace

std::byte* HostGroup::part_of_message(int local, size_t offset, size_t bytes) const {
  if (offset > kSmallBytes || bytes > kSmallBytes - offset) {
    throw ProtocolError(ranks_[local], "a block of " + std::to_string(bytes) + " bytes at byte " +
                                           std::to_string(offset) + " of a message, which has room for " +
                                           std::to_string(kSmallBytes) + " bytes");
  }
  return announcement(local).small + offset;
}

void HostGroup::take(std::byte* message, size_t bytes, std::byte* to) const {
  move_bytes(to, message, bytes);
  if (size() == 2) take_over(message, bytes);
}

void HostGroup::tell_rows(const Call& call, const void* in, uint64_t rows, size_t row_bytes,
                          std::span<uint64_t> rows_of_ranks) {
  const size_t bytes = rows * row_bytes;
  exchange_announcements(call, rows, nullptr, in, bytes <= kSmallBytes ? bytes : 0);
  for (int p = 0; p < size(); ++p) rows_of_ranks[p] = announcement(p).value;
  const uint64_t most = *std::ranges::max_element(rows_of_ranks);
  are_carried_ = row_bytes == 0 || most <= kSmallBytes / row_bytes;
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
    take(part_of_message(p, split.offset, to.sizes[p]), to.sizes[p], target + to.offsets[p]);
  }
}

void HostGroup::check_word_count(int64_t count, int sender) {
  if (count >= int64_t{kFewestWords} && count <= int64_t{kMostWords}) return;
  throw ProtocolError(sender, "a description of an array in " + std::to_string(count) + " words instead of " +
                                  std::to_string(kFewestWords) + " to " + std::to_string(kMostWords));
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
  if (index_ != root) {
    const auto* const told = reinterpret_cast<const int64_t*>(announcement(root).small);
    const int64_t count = told[0];
    check_word_count(count, ranks_[root]);
    words.assign(told + 1, told + 1 + count);
  }
  are_carried_ = announcement(root).value <= kSmallBytes;
}

void HostGroup::take_block(int root, const void* in, std::span<const size_t> sizes, void* out) {
  const size_t before = std::accumulate(sizes.begin(), sizes.begin() + index_, size_t{0});
  auto* const to = static_cast<std::byte*>(out);
  if (index_ == root) return move_bytes(to, static_cast<const std::byte*>(in) + before, sizes[index_]);
  const int64_t words = *reinterpret_cast<const int64_t*>(announcement(root).small);
  const size_t head = (1 + static_cast<size_t>(words)) * sizeof(int64_t);
  const size_t offset = head + before - (root < index_ ? sizes[root] : 0);
  take(part_of_message(root, offset, sizes[index_]), sizes[index_], to);
}

}  // namespace ronde
