// Every parser of messages between ranks' native code, for a fuzzer: the first byte of an input chooses the parser, the
// rest is its argument. A parser may throw ProtocolError and similar; an accepted message must be within its bounds.
#include "parsers.h"

#include <cstdlib>
#include <cstring>

#include "engine/board.h"
#include "engine/clock_note.h"
#include "engine/leader_note.h"
#include "engine/rows.h"
#include "error.h"
#include "frame.h"
#include "store_request.h"
#include "watch_message.h"

namespace ronde::fuzz {
namespace {

constexpr int kPeer = 1, kSize = 4;
constexpr size_t kCapacity = 100;

using Bytes = std::span<const std::byte>;

void require(bool holds) {
  if (!holds) std::abort();
}

std::vector<uint32_t> words_of(Bytes bytes) {
  std::vector<uint32_t> words(bytes.size() / sizeof(uint32_t));
  if (!words.empty()) std::memcpy(words.data(), bytes.data(), words.size() * sizeof(uint32_t));
  return words;
}

void watch_message(Bytes bytes) {
  const WatchMessage message = WatchMessage::parse(bytes, kPeer, kSize);
  if (message.type == WatchMessage::Type::kFailure) {
    for (const int rank : message.missing_ranks()) require(rank >= 0 && rank < kSize);
    require(message.reason_text().size() < sizeof(message.reason));
  }
  if (message.type == WatchMessage::Type::kNote) {
    require(message.missing_count >= 0 && static_cast<size_t>(message.missing_count) <= WatchMessage::kNoteWords);
  }
  if (message.type == WatchMessage::Type::kLongCall) require(!message.call.describe().empty());
}

void leader_note(Bytes bytes) {
  const LeaderNote note = LeaderNote::parse(words_of(bytes), kPeer, kCapacity);
  for (const uint32_t word : note.words) {
    require(note.type != LeaderNote::Type::kReady || word < kCapacity);
  }
  if (note.type != LeaderNote::Type::kEntry) return;
  check_entry(note.words, kPeer, kCapacity);
  for (size_t i = 1; i < note.words.size(); ++i) require(note.words[i] < kCapacity);
}

void clock_note(Bytes bytes) {
  const auto note = ClockNote::parse(words_of(bytes), kPeer);
  require(!note || (note->asked_ns >= 0 && note->answered_ns >= 0));
}

void frame(Bytes bytes) {
  if (bytes.size() < sizeof(Frame)) return;
  Frame frame;
  std::memcpy(static_cast<void*>(&frame), bytes.data(), sizeof(frame));
  Ends{kPeer, 0, "host"}.check(frame, Frame{.call = {}, .bytes = 8});
  require(frame.bytes == 8);
}

void store_request(Bytes bytes) {
  std::vector<char> frame(bytes.size());
  if (!frame.empty()) std::memcpy(frame.data(), bytes.data(), bytes.size());
  const auto request = read_request(frame);
  require(!request || request->key.size() + request->argument.size() < frame.size());
}

void store_arguments(Bytes bytes) {
  const std::string_view argument(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (const auto compared = read_compared_values(argument)) require(compared_values(*compared) == argument);
  std::string again;
  std::string_view keys = argument;
  while (const auto key = take_key(keys)) append_key(again, *key);
  require(again + std::string(keys) == argument);
  const auto number = read_decimal(argument);
  require(!number || std::abs(*number) < 1'000'000'000'000'000'000);
}

// Shape and rows as words of 64 bits: kind, dimensions, lengths, then rows.
void rows(Bytes bytes) {
  std::vector<uint64_t> words(bytes.size() / sizeof(uint64_t));
  if (words.size() < 2) return;
  std::memcpy(words.data(), bytes.data(), words.size() * sizeof(uint64_t));
  Signature signature;
  signature.kind = words[0] % 2 == 0 ? Kind::kAllgather : Kind::kAlltoall;
  const size_t dimensions = std::min<size_t>(words[1] % 4, words.size() - 2);
  for (size_t i = 0; i < dimensions; ++i) signature.shape.push_back(static_cast<int64_t>(words[2 + i]));
  const auto told = std::span(words).subspan(2 + dimensions);
  check_rows(signature, told, kPeer, kSize);
  unsigned __int128 total = 0;
  for (const uint64_t count : told) total += static_cast<unsigned __int128>(count) * signature.row_bytes();
  require(total <= uint64_t{1} << 62);
}

void text(Bytes bytes) {
  const std::string_view given(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const std::string clean = printable(given, 100);
  require(clean.size() <= 100 && printable(clean, 100) == clean);
}

constexpr void (*kParsers[])(Bytes) = {watch_message, leader_note, clock_note, frame,
                                       store_request, rows,        text,       store_arguments};

template <class Value>
std::vector<std::byte> seed(size_t parser, const Value* values, size_t count) {
  std::vector<std::byte> bytes(1 + count * sizeof(Value));
  bytes[0] = static_cast<std::byte>(parser);
  std::memcpy(bytes.data() + 1, values, count * sizeof(Value));
  return bytes;
}

template <class Value>
std::vector<std::byte> seed(size_t parser, std::initializer_list<Value> values) {
  return seed(parser, values.begin(), values.size());
}

}  // namespace

void run_one(std::span<const std::byte> input) {
  if (input.empty()) return;
  try {
    kParsers[static_cast<size_t>(input[0]) % std::size(kParsers)](input.subspan(1));
  } catch (const ProtocolError&) {
  } catch (const MismatchError&) {
  } catch (const Failure&) {
  }
}

std::vector<std::vector<std::byte>> seeds() {
  std::vector<std::vector<std::byte>> all;
  for (uint32_t type = 1; type <= 5; ++type) {
    WatchMessage message;
    message.type = static_cast<WatchMessage::Type>(type);
    message.rank = 1;
    message.failure_kind = 1;
    message.missing_count = 1;
    message.set_reason("rank 1 on host was lost");
    all.push_back(seed(0, {message}));
  }
  all.push_back(seed<uint32_t>(1, {1, 0, 5, 6}));
  all.push_back(seed<uint32_t>(1, {2, 1}));
  all.push_back(seed<uint32_t>(1, {3, 0, 2, 5, 6}));
  all.push_back(seed<uint32_t>(1, {3, 0, kNegotiationEntry}));
  all.push_back(seed<uint32_t>(2, {0x6b6c4301, 1, 0}));
  all.push_back(seed<uint32_t>(2, {0x6b6c4302, 1, 0, 2, 0}));
  all.push_back(seed(3, {Frame{.call = {}, .bytes = 8}}));
  all.push_back(seed(4, {'\0', '\0', '\0', '\25', '\1', '\0', '\0', '\0', '\0', '\0', '\0', '\0', '\1',
                         '\0', '\0', '\0', '\0',  '\0', '\0', '\0', '\0', '\0', '\1', 'k',  'v'}));
  all.push_back(seed<uint64_t>(5, {0, 2, 3, 2, 5, 3, 1, 0}));
  all.push_back(seed<uint64_t>(5, {1, 1, 9, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}));
  all.push_back(seed(6, {'c', 'a', 'f', '\xc3', '\xa9', '\n', '\xe2', '\x82', '\xac', '\xf0', '\x9f', '\x98', '\x80'}));
  all.push_back(seed(7, {'\0', '\0', '\0', '\3', 'o', 'l', 'd', 'n', 'e', 'w'}));
  all.push_back(seed(7, {'\0', '\1', 'a', '\0', '\2', 'b', 'c'}));
  all.push_back(
      seed(7, {'-', '1', '2', '3', '4', '5', '6', '7', '8', '9', '0', '1', '2', '3', '4', '5', '6', '7', '8'}));
  return all;
}

}  // namespace ronde::fuzz
