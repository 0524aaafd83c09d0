#include "words/word_trainer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>

#include "base/splitmix64.h"

namespace ronde {
namespace {

constexpr size_t kLongestSentence = 10'000;
constexpr double kShareOfUpdate = 0.01;  // see apply()
constexpr uint32_t kWordsPerLoss = 64;
constexpr float kMostChange = 4, kMostSum = 127;  // of a number, by a shard and by all: 127 / 2^-24 is less than 2^31
constexpr double kMostMove = 1, kMostMoveOfShards = 128;  // see apply()

}  // namespace

// The random numbers of a sentence.
class WordTrainer::Random {
 public:
  Random(uint64_t seed, uint64_t epoch, uint64_t shard, uint64_t sentence)
      : state_(splitmix64(splitmix64(splitmix64(splitmix64(seed) + epoch) + shard) + sentence)) {}

  uint64_t next() { return splitmix64(state_ += kSplitMixStep); }
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>(((next() >> 32) * bound) >> 32); }

 private:
  uint64_t state_;
};

EncodedShard encode(const WordTable& table, std::string_view text, TextForm form) {
  EncodedShard shard;
  const auto end_sentence = [&] {
    const size_t begin = shard.ends.empty() ? 0 : shard.ends.back();
    if (shard.words.size() > begin) shard.ends.push_back(shard.words.size());
  };
  WordReader reader(text, form);
  for (auto item = reader.next(); item != WordReader::Item::kTextEnd; item = reader.next()) {
    if (item == WordReader::Item::kSentenceEnd) {
      end_sentence();
    } else if (const int32_t word = table.find(reader.word()); word != WordTable::kUnknown) {
      shard.words.push_back(word);
      if (shard.words.size() - (shard.ends.empty() ? 0 : shard.ends.back()) == kLongestSentence) end_sentence();
    }
  }
  end_sentence();
  return shard;
}

std::pair<size_t, size_t> part_of(const EncodedShard& shard, size_t part, size_t parts) {
  // A sentence belongs to the part in which it ends.
  const auto bound = [&](size_t number) {
    const size_t word = shard.words.size() * number / parts;
    return static_cast<size_t>(std::upper_bound(shard.ends.begin(), shard.ends.end(), word) - shard.ends.begin());
  };
  return {bound(part), bound(part + 1)};
}

SharedRows::SharedRows(float* rows, size_t count, size_t width, size_t shards)
    : rows_(rows),
      width_(width),
      most_change_(std::min(kMostChange, kMostSum / static_cast<float>(shards))),
      most_updates_(static_cast<int32_t>(INT32_MAX / shards)),
      copies_(new float[count * width]),
      sums_(count * (width + kCounts)),
      uses_(count),
      is_changed_(count) {}

void SharedRows::copy(size_t number) {
  uses_[number] = {1, static_cast<uint32_t>(copied_.size())};
  std::copy_n(rows_ + number * width_, width_, copies_.get() + copied_.size() * width_);
  copied_.push_back(number);
}

void SharedRows::prefetch_change(size_t number) {
  constexpr size_t kLine = 64 / sizeof(float);
  const float* row = rows_ + number * width_;
  const int32_t* sums = sums_of(number);
  for (size_t at = 0; at < width_; at += kLine) {
    __builtin_prefetch(row + at);
    __builtin_prefetch(sums + at, 1);
  }
}

void SharedRows::end_shard() {
  constexpr size_t kAhead = 4;
  const WordKernels& kernels = best_word_kernels();
  for (size_t at = 0; at < copied_.size(); ++at) {
    if (at + kAhead < copied_.size()) prefetch_change(copied_[at + kAhead]);
    const size_t number = copied_[at];
    int32_t* sums = sums_of(number);
    kernels.add_change(copies_.get() + at * width_, rows_ + number * width_, width_, most_change_, sums);
    sums[width_] += uses_[number].updates;
    sums[width_ + 1] += 1;
    uses_[number].updates = 0;
    is_changed_[number] = 1;
  }
  copied_.clear();
}

void SharedRows::take(std::span<const int64_t> numbers, int32_t* sums) {
  for (const int64_t number : numbers) sums = std::copy_n(sums_of(static_cast<size_t>(number)), sums_per_row(), sums);
}

void SharedRows::put(std::span<const int64_t> numbers, const int32_t* sums) {
  for (const int64_t number : numbers) {
    std::copy_n(sums, sums_per_row(), sums_of(static_cast<size_t>(number)));
    sums += sums_per_row();
  }
}

double SharedRows::mean_square(std::span<const int64_t> numbers) {
  double sum = 0, weights = 0;
  for (const int64_t signed_number : numbers) {
    const auto number = static_cast<size_t>(signed_number);
    const float square = best_word_kernels().square(rows_ + number * width_, width_);
    sum += static_cast<double>(square) * sums_of(number)[width_];
    weights += sums_of(number)[width_];
  }
  return weights > 0 ? sum / weights : 0;
}

void SharedRows::apply(std::span<const int64_t> numbers, float share) {
  for (const int64_t signed_number : numbers) {
    const auto number = static_cast<size_t>(signed_number);
    float* row = rows_ + number * width_;
    int32_t* sums = sums_of(number);
    const float way = share * static_cast<float>(sums[width_]);
    const double length = std::sqrt(static_cast<double>(best_word_kernels().square_of_change(sums, width_)));
    const double shards = sums[width_ + 1];
    const double most_move = std::max({kMostMove, kMostMoveOfShards / shards, length / shards});
    const float scale = (1 + way / static_cast<float>(shards)) / (1 + way);
    const auto most_scale = static_cast<float>(most_move / std::max(length, most_move));
    best_word_kernels().apply_change(row, width_, sums, std::min(scale, most_scale));
    std::fill_n(sums, sums_per_row(), 0);
    is_changed_[number] = 0;
  }
}

WordTrainer::WordTrainer(const WordOptions& options, std::span<const int64_t> counts, float* vectors, float* outputs)
    : options_(options),
      vectors_(vectors, counts.size(), options.width, options.shards),
      outputs_(outputs, options.negative > 0 || counts.size() < 2 ? counts.size() : counts.size() - 1, options.width,
               options.shards),
      kernels_(best_word_kernels()),
      mean_(options.width),
      copy_(options.width) {
  make_chances(counts);
  if (options.negative > 0) {
    make_samples(counts);
  } else {
    make_tree(counts);
  }
}

void WordTrainer::apply(std::span<const int64_t> vectors, std::span<const int64_t> outputs, float rate) {
  const double share = kShareOfUpdate * static_cast<double>(rate);
  // The second derivative of the loss along a row is proportional to the squared length of its partner.
  const double of_vectors = share * outputs_.mean_square(outputs), of_outputs = share * vectors_.mean_square(vectors);
  vectors_.apply(vectors, static_cast<float>(of_vectors));
  outputs_.apply(outputs, static_cast<float>(of_outputs));
}

void WordTrainer::make_chances(std::span<const int64_t> counts) {
  const auto total = static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  chances_.assign(counts.size(), UINT32_MAX);
  if (options_.sample <= 0) return;
  for (size_t word = 0; word < counts.size(); ++word) {
    const double ratio = options_.sample * total / static_cast<double>(counts[word]);
    const double chance = std::sqrt(ratio) + ratio;
    if (chance < 1) chances_[word] = static_cast<uint32_t>(chance * UINT32_MAX);
  }
}

void WordTrainer::make_samples(std::span<const int64_t> counts) {
  std::vector<double> shares(counts.size());  // of draws, in those of a word on average
  for (size_t word = 0; word < counts.size(); ++word)
    shares[word] = std::pow(static_cast<double>(counts[word]), options_.ns_exponent);
  const double mean =
      std::accumulate(shares.begin(), shares.end(), 0.0) / static_cast<double>(std::max<size_t>(1, counts.size()));
  std::vector<size_t> rare, frequent;
  for (size_t word = 0; word < counts.size(); ++word) {
    shares[word] /= mean;
    (shares[word] < 1 ? rare : frequent).push_back(word);
    samples_.push_back({UINT32_MAX, static_cast<int32_t>(word)});
  }
  while (!rare.empty() && !frequent.empty()) {
    const size_t word = rare.back(), other = frequent.back();
    rare.pop_back();
    samples_[word] = {static_cast<uint32_t>(shares[word] * UINT32_MAX), static_cast<int32_t>(other)};
    shares[other] -= 1 - shares[word];
    if (shares[other] >= 1) continue;
    frequent.pop_back();
    rare.push_back(other);
  }
}

void WordTrainer::make_tree(std::span<const int64_t> counts) {
  const size_t words = counts.size(), nodes = words > 1 ? words - 1 : 0;
  // Of words and, from `words` on, of nodes.
  std::vector<size_t> parents(words + nodes);
  std::vector<float> labels(words + nodes);
  using Item = std::pair<int64_t, size_t>;  // of equal counts, the smaller number first
  std::priority_queue<Item, std::vector<Item>, std::greater<>> roots;
  for (size_t word = 0; word < words; ++word) roots.emplace(counts[word], word);
  for (size_t node = words; node < words + nodes; ++node) {
    const Item left = roots.top();
    roots.pop();
    const Item right = roots.top();
    roots.pop();
    parents[left.second] = parents[right.second] = node;
    labels[left.second] = 1;
    roots.emplace(left.first + right.first, node);
  }
  const size_t root = words + nodes - 1;
  for (size_t word = 0; word < words; ++word) {
    for (size_t at = word; nodes > 0 && at != root; at = parents[at]) {
      path_.emplace_back(static_cast<int32_t>(parents[at] - words), labels[at]);
    }
    path_ends_.push_back(path_.size());
  }
}

void WordTrainer::draw(Random& random) {
  const auto window = static_cast<uint32_t>(options_.window);
  reaches_.clear();
  drawn_.clear();
  for (size_t at = 0; at < kept_.size(); ++at) {
    reaches_.push_back(options_.shrinks_window ? 1 + random.below(window) : window);
    for (size_t i = 0; i < options_.negative; ++i) drawn_.push_back(draw_sample(random.next()));
  }
}

int32_t WordTrainer::draw_sample(uint64_t random) const {
  const uint64_t word = ((random >> 32) * samples_.size()) >> 32;
  const Sample sample = samples_[word];
  return static_cast<uint32_t>(random) <= sample.chance ? static_cast<int32_t>(word) : sample.other;
}

void WordTrainer::prefetch_outputs(size_t at) const {
  outputs_.prefetch(static_cast<size_t>(kept_[at]));
  for (size_t i = 0; i < options_.negative; ++i) {
    outputs_.prefetch(static_cast<size_t>(drawn_[at * options_.negative + i]));
  }
}

void WordTrainer::choose_outputs(size_t at) {
  const int32_t word = kept_[at];
  chosen_.clear();
  labels_.clear();
  if (options_.negative == 0) {
    const auto number = static_cast<size_t>(word);
    for (size_t node = number > 0 ? path_ends_[number - 1] : 0; node < path_ends_[number]; ++node) {
      chosen_.push_back(path_[node].first);
      labels_.push_back(path_[node].second);
    }
  } else {
    chosen_.push_back(word);
    labels_.push_back(1);
    for (size_t i = 0; i < options_.negative; ++i) {
      const int32_t sample = drawn_[at * options_.negative + i];
      if (std::find(chosen_.begin(), chosen_.end(), sample) != chosen_.end()) continue;
      chosen_.push_back(sample);
      labels_.push_back(0);
    }
  }
  columns_.clear();
  for (const int32_t number : chosen_) columns_.push_back(outputs_.row(static_cast<size_t>(number)));
}

void WordTrainer::choose_words(std::span<const int32_t> sentence, Random& random) {
  kept_.clear();
  for (const int32_t word : sentence) {
    const uint32_t chance = chances_[static_cast<size_t>(word)];
    if (chance == UINT32_MAX || static_cast<uint32_t>(random.next() >> 32) <= chance) kept_.push_back(word);
  }
  inputs_.clear();
  for (const int32_t word : kept_) inputs_.push_back(vectors_.row(static_cast<size_t>(word)));
}

void WordTrainer::add_loss(size_t inputs, float rate, Loss& loss) {
  for (size_t i = 0; i < inputs * columns_.size(); ++i) {
    const double error = std::min(std::fabs(static_cast<double>(slopes_[i]) / static_cast<double>(rate)), 1 - 1e-7);
    loss.sum -= std::log1p(-error);
  }
  loss.count += static_cast<int64_t>(inputs);
}

void WordTrainer::train_word(float rate, Loss& loss) {
  const bool is_cbow = options_.is_cbow;
  float* mean = mean_.data();
  const size_t inputs = is_cbow ? 1 : batch_.size();
  slopes_.resize(std::max(slopes_.size(), word_slopes(inputs, columns_.size())));
  if (is_cbow) kernels_.average(batch_.data(), batch_.size(), options_.width, mean, copy_.data());
  kernels_.train({is_cbow ? &mean : batch_.data(), inputs, columns_.data(), labels_.data(), columns_.size(),
                  options_.width, rate, slopes_.data()});
  if (is_cbow) kernels_.spread(batch_.data(), batch_.size(), options_.width, mean, copy_.data());
  for (const int32_t number : chosen_) outputs_.add_updates(static_cast<size_t>(number), inputs);
  if (words_trained_++ % kWordsPerLoss == 0) add_loss(inputs, rate, loss);
}

void WordTrainer::train_sentence(float rate, Loss& loss) {
  for (size_t at = 0; at < kept_.size(); ++at) {
    if (options_.negative > 0 && at + 1 < kept_.size()) prefetch_outputs(at + 1);
    const size_t first = at - std::min<size_t>(at, reaches_[at]);
    const size_t last = std::min<size_t>(kept_.size(), at + reaches_[at] + 1);
    if (last - first < 2) continue;
    batch_.assign(inputs_.begin() + static_cast<ptrdiff_t>(first), inputs_.begin() + static_cast<ptrdiff_t>(at));
    batch_.insert(batch_.end(), inputs_.begin() + static_cast<ptrdiff_t>(at) + 1,
                  inputs_.begin() + static_cast<ptrdiff_t>(last));
    choose_outputs(at);
    if (columns_.empty()) continue;
    train_word(rate, loss);
    for (size_t other = first; other < last; ++other) {
      if (other != at) vectors_.add_updates(static_cast<size_t>(kept_[other]), columns_.size());
    }
  }
}

WordTrainer::Loss WordTrainer::train(const EncodedShard& shard, uint64_t shard_number, size_t first, size_t last,
                                     uint64_t epoch, float rate, float last_rate) {
  Loss loss;
  words_trained_ = 0;
  const size_t begin = first > 0 ? shard.ends[first - 1] : 0;
  const size_t words = last > first ? shard.ends[last - 1] - begin : 0;
  for (size_t sentence = first; sentence < last; ++sentence) {
    const size_t from = sentence > 0 ? shard.ends[sentence - 1] : 0;
    const float done = static_cast<float>(from - begin) / static_cast<float>(words);
    Random random(options_.seed, epoch, shard_number, sentence);
    choose_words({shard.words.data() + from, shard.ends[sentence] - from}, random);
    draw(random);
    train_sentence(rate + (last_rate - rate) * done, loss);
  }
  vectors_.end_shard();
  outputs_.end_shard();
  return loss;
}

}  // namespace ronde
