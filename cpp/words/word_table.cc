#include "words/word_table.h"

#include <array>
#include <cstring>

#include "base/error.h"

namespace ronde {
namespace {

enum ByteKind : uint8_t { kPart, kWordEnd, kSentenceEnd };

constexpr std::array<uint8_t, 256> kinds_of(std::string_view word_ends, char sentence_end) {
  std::array<uint8_t, 256> kinds{};
  for (const char byte : word_ends) kinds[static_cast<uint8_t>(byte)] = kWordEnd;
  kinds[static_cast<uint8_t>(sentence_end)] = kSentenceEnd;
  return kinds;
}

constexpr auto kKindsOfLines = kinds_of(" \t\r\v\f\x1c\x1d\x1e\x1f", '\n');
constexpr auto kKindsOfParts = kinds_of("\x1f", '\x1e');

uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 32)) * 0x9E3779B97F4A7C15u;
  return value ^ (value >> 29);
}

uint64_t word_hash(std::string_view word) {
  uint64_t hash = word.size(), piece = 0;
  const char* at = word.data();
  size_t left = word.size();
  for (; left >= sizeof piece; left -= sizeof piece, at += sizeof piece) {
    std::memcpy(&piece, at, sizeof piece);
    hash = mixed(hash ^ piece);
  }
  piece = 0;
  std::memcpy(&piece, at, left);
  return mixed(mixed(hash ^ piece));
}

}  // namespace

WordReader::WordReader(std::string_view text, TextForm form)
    : at_(text.data()),
      end_(text.data() + text.size()),
      kinds_(form == TextForm::kLines ? kKindsOfLines.data() : kKindsOfParts.data()) {}

WordReader::Item WordReader::next() {
  while (at_ != end_ && kinds_[static_cast<uint8_t>(*at_)] == kWordEnd) ++at_;
  if (at_ == end_) return Item::kTextEnd;
  const char* begin = at_;
  while (at_ != end_ && kinds_[static_cast<uint8_t>(*at_)] == kPart) ++at_;
  if (at_ == begin) {
    ++at_;
    return Item::kSentenceEnd;
  }
  word_ = {begin, static_cast<size_t>(at_ - begin)};
  return Item::kWord;
}

size_t WordTable::place_of(std::string_view word, uint64_t hash) const {
  const size_t mask = slots_.size() - 1;
  size_t place = hash & mask;
  for (; slots_[place] != kUnknown; place = (place + 1) & mask) {
    const Entry& entry = entries_[static_cast<size_t>(slots_[place])];
    if (entry.hash == hash && this->word(static_cast<size_t>(slots_[place])) == word) break;
  }
  return place;
}

void WordTable::grow() {
  constexpr size_t kLeast = 1024;
  slots_.assign(slots_.empty() ? kLeast : 2 * slots_.size(), kUnknown);
  const size_t mask = slots_.size() - 1;
  for (size_t number = 0; number < entries_.size(); ++number) {
    size_t place = entries_[number].hash & mask;
    while (slots_[place] != kUnknown) place = (place + 1) & mask;
    slots_[place] = static_cast<int32_t>(number);
  }
}

void WordTable::add(std::string_view word, int64_t times) {
  if (2 * entries_.size() >= slots_.size()) grow();
  const uint64_t hash = word_hash(word);
  int32_t& slot = slots_[place_of(word, hash)];
  if (slot == kUnknown) {
    if (entries_.size() >= INT32_MAX) throw UsageError("a text has more than 2^31 different words");
    slot = static_cast<int32_t>(entries_.size());
    entries_.push_back({bytes_.size(), word.size(), hash, 0});
    bytes_.append(word);
  }
  entries_[static_cast<size_t>(slot)].count += times;
}

void WordTable::add_text(std::string_view text, TextForm form) {
  WordReader reader(text, form);
  for (auto item = reader.next(); item != WordReader::Item::kTextEnd; item = reader.next()) {
    if (item == WordReader::Item::kWord) add(reader.word(), 1);
  }
}

int32_t WordTable::find(std::string_view word) const {
  return slots_.empty() ? kUnknown : slots_[place_of(word, word_hash(word))];
}

}  // namespace ronde
