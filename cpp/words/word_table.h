// Words of sentences, numbered in the order in which they first occur, with their counts.
//
// A text is UTF-8 and a row of sentences of words. In a text of lines, sentences end with a line feed and words with
// white space of ASCII or U+001C to U+001F. In a text of parts, sentences end with the character U+001E and words with
// U+001F, so that words may contain everything else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ronde {

enum class TextForm { kLines, kParts };

// Returns the words of a text, one after the other.
class WordReader {
 public:
  WordReader(std::string_view text, TextForm form);

  enum class Item { kWord, kSentenceEnd, kTextEnd };

  // Reads the next item; a word is then word().
  Item next();
  std::string_view word() const { return word_; }

 private:
  const char* at_;
  const char* end_;
  const uint8_t* kinds_;  // of bytes
  std::string_view word_;
};

class WordTable {
 public:
  static constexpr int32_t kUnknown = -1;

  // Counts a word `times` more.
  void add(std::string_view word, int64_t times);
  void add_text(std::string_view text, TextForm form);
  // The number of a word, or kUnknown.
  int32_t find(std::string_view word) const;

  size_t size() const { return entries_.size(); }
  std::string_view word(size_t number) const {
    return {bytes_.data() + entries_[number].begin, entries_[number].length};
  }
  int64_t count(size_t number) const { return entries_[number].count; }

 private:
  struct Entry {
    size_t begin;  // in bytes_
    size_t length;
    uint64_t hash;
    int64_t count;
  };

  // The place in slots_ of a word, or of the gap where it belongs.
  size_t place_of(std::string_view word, uint64_t hash) const;
  void grow();

  std::string bytes_;
  std::vector<Entry> entries_;
  std::vector<int32_t> slots_;  // numbers of entries, by hash; kUnknown: a gap. Their number is a power of two.
};

}  // namespace ronde
