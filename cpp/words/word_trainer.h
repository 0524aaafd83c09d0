// Training of Word2Vec (Mikolov et al. 2013) on shards of sentences, one after the other.
//
// A shard is trained on copies of the vectors that it touches. Then the differences from the vectors before are added
// to sums of all shards, as integers: so neither the order of shards nor which task trains which of them changes a bit.
// Random numbers depend on the seed, the epoch, the shard and the number of the sentence.
//
// With negative sampling, the words around a word share its negative samples (Ji et al. 2016), so that an update is a
// product of small matrices. With hierarchical softmax, the outputs are the nodes above a word in a Huffman tree.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/word_batch.h"
#include "words/word_table.h"

namespace ronde {

struct WordOptions {
  size_t width;     // of a vector: a multiple of kWordLanes
  size_t window;    // at least 1: of a word, how many words before and after it count at most
  size_t negative;  // how many negative samples; 0: hierarchical softmax
  bool is_cbow;
  bool shrinks_window;  // to a random size from 1, for each word
  double sample;        // words that are more frequent than this are left out at random; 0: none
  double ns_exponent;   // negative samples have the frequencies of words to this power
  size_t shards;        // of all trainers: at least 1
  uint64_t seed;
};

// Words of sentences as numbers.
struct EncodedShard {
  std::vector<int32_t> words;
  std::vector<size_t> ends;  // of sentences, in words; no sentence is empty
};

// Words that the table does not have are left out. Sentences longer than 10,000 words are cut.
EncodedShard encode(const WordTable& table, std::string_view text, TextForm form);

// Part `part` of `parts` of a shard, by numbers of sentences.
std::pair<size_t, size_t> part_of(const EncodedShard& shard, size_t part, size_t parts);

// A matrix of one row for each word (or node): the vectors before, and the sums of what shards changed.
class SharedRows {
 public:
  // `shards`: of all trainers. What one of them adds is limited so that the sums of all fit in 32 bits.
  SharedRows(float* rows, size_t count, size_t width, size_t shards);

  // The copy of a row that the shard being trained changes.
  float* row(size_t number) {
    if (uses_[number].updates == 0) copy(number);
    return copies_.get() + uses_[number].copy * width_;
  }
  // Lets row() find the row in the cache.
  void prefetch(size_t number) const {
    constexpr size_t kLine = 64 / sizeof(float);
    const Use use = uses_[number];
    const float* row = use.updates == 0 ? rows_ + number * width_ : copies_.get() + use.copy * width_;
    for (size_t at = 0; at < width_; at += kLine) __builtin_prefetch(row + at);
  }
  // Notes that the shard has changed a row for so many more predictions.
  void add_updates(size_t number, size_t count) {
    int32_t& updates = uses_[number].updates;
    updates = static_cast<int32_t>(std::min<int64_t>(most_updates_, updates + int64_t(count)));
  }
  // Adds what a shard changed to the sums.
  void end_shard();
  // Whether each row was changed since the last apply, as 1 or 0.
  std::span<const uint8_t> changed() const { return is_changed_; }
  // How many numbers the sums of a row take: of the changes, of the updates and of the shards.
  size_t sums_per_row() const { return width_ + kCounts; }
  // Copies the sums of some rows to `sums`, or back.
  void take(std::span<const int64_t> numbers, int32_t* sums);
  void put(std::span<const int64_t> numbers, const int32_t* sums);
  // The mean squared length of some rows, each with the weight of its updates.
  double mean_square(std::span<const int64_t> numbers);
  // Adds the sums of some rows to the rows, and empties them. `share`: how much of the way an update makes.
  //
  // Where shards change a row often, each of them makes most of the way, and the sum of their changes would lead beyond
  // the end. If an update makes a share a of the way, n updates make about na / (1 + na) of it. So the changes of k
  // shards with n updates all together are multiplied by (1 + na / k) / (1 + na): k times n / k updates become n.
  //
  // While rows are short, a is about 0, and does not tell how far many shards lead. So a row moves by no more than the
  // largest of these lengths: 1, 128 / k (with 8 shards, rows of outputs have moved by 11 in good fits), and that of
  // the mean of its shards' changes.
  void apply(std::span<const int64_t> numbers, float share);

 private:
  // What the shard being trained does with a row.
  struct Use {
    int32_t updates;  // 0: there is no copy
    uint32_t copy;    // its place in copies_
  };

  void copy(size_t number);
  void prefetch_change(size_t number);

  static constexpr size_t kCounts = 2;

  int32_t* sums_of(size_t number) { return sums_.data() + number * sums_per_row(); }

  float* rows_;
  size_t width_;
  float most_change_;                // of a number, by a shard
  int32_t most_updates_;             // of a row, by a shard
  std::unique_ptr<float[]> copies_;  // one behind the other, so that they stay in the cache; uninitialized
  std::vector<int32_t> sums_;
  std::vector<Use> uses_;
  std::vector<uint8_t> is_changed_;
  std::vector<size_t> copied_;  // rows, by the places of their copies
};

class WordTrainer {
 public:
  // `counts`: how often each word occurs, in descending order. `vectors`: a row for each word; `outputs`: a row for
  // each word, or node of the tree, of which there is one less than there are words (but one row at least). Both are
  // used until the trainer ends, and change in apply() only.
  WordTrainer(const WordOptions& options, std::span<const int64_t> counts, float* vectors, float* outputs);

  // Trains on the sentences [first, last) of a shard. `rates`: the learning rates at the begin and the end. Returns the
  // mean loss of some predictions, weighted by their number, and that number.
  struct Loss {
    double sum = 0;
    int64_t count = 0;
  };
  Loss train(const EncodedShard& shard, uint64_t shard_number, size_t first, size_t last, uint64_t epoch, float rate,
             float last_rate);

  // Adds the changes of all shards to some vectors and outputs. `rate`: with which they trained.
  void apply(std::span<const int64_t> vectors, std::span<const int64_t> outputs, float rate);

  SharedRows& vectors() { return vectors_; }
  SharedRows& outputs() { return outputs_; }

 private:
  class Random;

  // Walker's alias method: a draw of a word at random ends at it with the chance, of 2^32, and else at another one. The
  // table is small enough for the cache, unlike one that has each word as often as it is drawn.
  struct Sample {
    uint32_t chance;
    int32_t other;
  };

  void make_samples(std::span<const int64_t> counts);
  void make_tree(std::span<const int64_t> counts);
  void make_chances(std::span<const int64_t> counts);
  // Draws what the words of the sentence need, so that memory can be read ahead.
  void draw(Random& random);
  // `random`: 64 random bits.
  int32_t draw_sample(uint64_t random) const;
  void prefetch_outputs(size_t at) const;
  void choose_outputs(size_t at);
  void choose_words(std::span<const int32_t> sentence, Random& random);
  void train_sentence(float rate, Loss& loss);
  void train_word(float rate, Loss& loss);
  void add_loss(size_t inputs, float rate, Loss& loss);

  WordOptions options_;
  SharedRows vectors_, outputs_;
  const WordKernels& kernels_;
  std::vector<Sample> samples_;                  // of each word
  std::vector<uint32_t> chances_;                // by word: it stays if a random number of 32 bits is not larger
  std::vector<size_t> path_ends_;                // by word, in path_: hierarchical softmax
  std::vector<std::pair<int32_t, float>> path_;  // nodes, and the label of each
  // Of the sentence that is being trained
  std::vector<int32_t> kept_, drawn_;   // words; and the negative samples of each
  std::vector<uint32_t> reaches_;       // of windows
  std::vector<float*> inputs_, batch_;  // all of the sentence, and those around the word that is being trained
  std::vector<int32_t> chosen_;
  std::vector<float*> columns_;
  std::vector<float> labels_, slopes_;
  std::vector<float> mean_, copy_;
  uint32_t words_trained_ = 0;
};

}  // namespace ronde
