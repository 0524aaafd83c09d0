#include "kernels/topic_sampler.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>
#include <utility>

#include "base/splitmix64.h"
#include "kernels/reduce_kernels.h"

namespace ronde {
namespace {

constexpr double kFixedPoint = 1 << 20;  // of sums
constexpr double kLeastProduct = 1e-150;
constexpr size_t kDocumentsAtOnce = 16;  // so that the processor need not wait for memory
constexpr size_t kMostDrawn = 8;         // topics that the kernel draws at once
constexpr size_t kMostCumulated = 2048;  // numbers that it keeps for them: they stay in the first cache
constexpr size_t kHugePage = 1 << 21;    // bytes
constexpr size_t kMostPrefetched = 512;  // weights of a word; the processor prefetches further ones

// The random numbers of the tokens of a document, by their places.
class TokenRandom {
 public:
  TokenRandom(const TopicDraw& draw, size_t row)
      : key_(splitmix64(splitmix64(splitmix64(draw.seed + kSplitMixStep) + draw.step * kSplitMixStep) +
                        (static_cast<uint64_t>(draw.first_row) + row) * kSplitMixStep)) {}

  float uniform() { return static_cast<float>(splitmix64(key_ += kSplitMixStep) >> 40) * 0x1p-24f; }  // in [0, 1)

 private:
  uint64_t key_;
};

// The tokens that an entry stands for. They have equal units, but for the first ones that have one more.
struct EntryTokens {
  int64_t count, units, larger;

  EntryTokens(double occurrences, double scale) {
    if (!(occurrences > 0)) {
      count = units = larger = 0;
      return;
    }
    if (const auto whole = static_cast<int64_t>(std::min(occurrences, 1e9));  // most often
        scale == 1 && whole <= kMostTokens && static_cast<double>(whole) == occurrences) {
      count = whole;
      units = 1;
      larger = 0;
      return;
    }
    const int64_t all = std::max<int64_t>(1, std::llrint(occurrences * scale));
    count = std::min({kMostTokens, all, static_cast<int64_t>(std::ceil(std::min(occurrences, 1e9)))});
    units = all / count;
    larger = all % count;
  }

  int64_t units_of(int64_t token) const { return units + (token < larger ? 1 : 0); }
};

template <class Function>
void for_each_token(const Documents& documents, size_t row, double scale, Function&& function) {
  for (int64_t entry = documents.offsets[row]; entry < documents.offsets[row + 1]; ++entry) {
    const EntryTokens tokens(documents.counts[entry], scale);
    const auto word = static_cast<size_t>(documents.words[entry]);
    for (int64_t token = 0; token < tokens.count; ++token) function(word, tokens.units_of(token));
  }
}

int64_t count_tokens(const Documents& documents, size_t begin, size_t end, double scale) {
  int64_t count = 0;
  for (int64_t entry = documents.offsets[begin]; entry < documents.offsets[end]; ++entry)
    count += EntryTokens(documents.counts[entry], scale).count;
  return count;
}

int64_t fixed_point(double x) { return std::llrint(x * kFixedPoint); }

}  // namespace

double portable_log(double x) {
  int exponent;
  double fraction = std::frexp(x, &exponent);
  if (fraction < 0.70710678118654752) {
    fraction *= 2;
    --exponent;
  }
  const double s = (fraction - 1) / (fraction + 1), square = s * s;
  double series = 0;
  for (int power = 21; power > 0; power -= 2) series = series * square + 1.0 / power;
  return exponent * 0.69314718055994531 + 2 * s * series;
}

double digamma(double x) {
  double result = 0;
  for (; x < 8; x += 1) result -= 1 / x;
  const double inverse = 1 / x, square = inverse * inverse;
  const double series =
      square * (1.0 / 12 - square * (1.0 / 120 - square * (1.0 / 252 - square * (1.0 / 240 - square / 132))));
  return result + portable_log(x) - inverse / 2 - series;
}

TopicWeights::TopicWeights(const int32_t* counts, size_t words, const double* priors, size_t topics, double word_prior,
                           double scale)
    : totals_(topics),
      prior_values_(priors, priors + topics),
      prior_digammas_(topics),
      words_(words),
      stride_((topics + kTopicLanes - 1) / kTopicLanes * kTopicLanes),
      word_prior_(static_cast<float>(word_prior * scale)),
      scale_(scale) {
  float* const all = allocate(words * stride_);
  priors_.resize(stride_);
  std::vector<int64_t> sums(topics);
  for (size_t w = 0; w < words; ++w)
    for (size_t k = 0; k < topics; ++k) sums[k] += counts[w * topics + k];
  std::vector<float> inverses(topics);
  for (size_t k = 0; k < topics; ++k) {
    const double total = static_cast<double>(sums[k]) + word_prior * scale * static_cast<double>(words);
    totals_[k] = static_cast<float>(total);
    inverses[k] = static_cast<float>(1 / total);
    priors_[k] = static_cast<float>(priors[k] * scale);
    prior_sum_ += priors[k];
    prior_digammas_[k] = digamma(priors[k]);
  }
  prior_sum_digamma_ = digamma(prior_sum_);
  for (size_t w = 0; w < words; ++w) {
    float* const own = all + w * stride_;
    for (size_t k = 0; k < topics; ++k)
      own[k] = (static_cast<float>(counts[w * topics + k]) + word_prior_) * inverses[k];
    std::fill(own + topics, own + stride_, 0.0f);
  }
}

float* TopicWeights::allocate(size_t count) {
  const size_t bytes = (count * sizeof(float) / kHugePage + 1) * kHugePage;
  weights_.reset(static_cast<float*>(std::aligned_alloc(kHugePage, bytes)));
  if (weights_ == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  (void)madvise(weights_.get(), bytes, MADV_HUGEPAGE);  // most accesses are to other words, and so to other pages
#endif
  return weights_.get();
}

// Samples the tokens of one document after the other. It keeps the units of each topic in the document.
//
// A token takes two calls, leave_out() and take(); between them the kernel draws its topic.
class DocumentSampler {
 public:
  explicit DocumentSampler(const TopicWeights& weights)
      : all_(weights), units_(weights.topics()), shares_(weights.stride_) {}

  // Begins a document. Returns its number of tokens; if this is 0, the sampler has none.
  size_t begin(const Documents& documents, size_t row, TokenRandom random, uint16_t* topics) {
    random_ = random;
    topics_ = topics;
    std::fill(units_.begin(), units_.end(), 0);
    total_ = 0;
    tokens_.clear();
    for_each_token(documents, row, all_.scale_, [&](size_t word, int64_t units) {
      tokens_.push_back({static_cast<uint32_t>(word), static_cast<int32_t>(units)});
      const uint16_t topic = *topics++;
      if (topic == kNoTopic) return;
      units_[topic] += static_cast<int32_t>(units);
      total_ += units;
    });
    if (tokens_.empty()) return 0;
    std::copy(all_.priors_.begin(), all_.priors_.end(), shares_.begin());
    for (size_t k = 0; k < units_.size(); ++k) shares_[k] += static_cast<float>(units_[k]);
    product_ = 1;
    logarithm_ = 0;
    at_ = 0;
    prefetch();
    return tokens_.size();
  }

  // Makes weight x share of the next token's old topic the product without the token.
  TopicDrawing leave_out() {
    const Token token = tokens_[at_];
    const float* const own = all_.weights_of(token.word);
    const uint16_t topic = topics_[at_];
    if (topic != kNoTopic) {
      const float total = all_.totals_[topic], units = static_cast<float>(token.units), weight = own[topic];
      const float others = std::max(weight * total - units, all_.word_prior_);
      units_[topic] -= token.units;
      total_ -= token.units;
      shares_[topic] = share(topic) * (others / (std::max(total - units, others) * weight));
    }
    return {own, shares_.data(), random_.uniform(), 0, 0};
  }

  // Gives the topic that was drawn to the token. Returns whether the document has more of them.
  bool take(const TopicDrawing& drawn, int32_t* counts, const TopicSums& sums) {
    const Token token = tokens_[at_];
    const uint16_t old_topic = topics_[at_];
    uint32_t topic = drawn.topic;
    if (topic >= units_.size()) topic = old_topic != kNoTopic ? old_topic : 0;  // of rounding
    if (old_topic != kNoTopic) shares_[old_topic] = share(old_topic);
    units_[topic] += token.units;
    shares_[topic] = share(topic);
    topics_[at_] = static_cast<uint16_t>(topic);
    count(&counts[token.word * all_.topics() + topic], token.units);
    add_likelihood(static_cast<double>(drawn.mass), token.units);
    total_ += token.units;
    if (++at_ < tokens_.size()) {
      prefetch();
      return true;
    }
    count(nullptr, 0);
    *sums.log_likelihood += fixed_point(logarithm_ + portable_log(product_));
    if (sums.priors != nullptr) add_to_priors(sums.priors);
    return false;
  }

 private:
  struct Token {
    uint32_t word;
    int32_t units;
  };

  // Adds the units of the last token to its count, and fetches the count of this one.
  void count(int32_t* next, int32_t units) {
    if (count_ != nullptr) *count_ += count_units_;
    count_ = next;
    count_units_ = units;
    if (next != nullptr) __builtin_prefetch(next, 1);
  }

  // `mass`: the sum of weight x share of all topics.
  void add_likelihood(double mass, int32_t units) {
    if (total_ != others_) {  // seldom: most tokens have equal units
      others_ = total_;
      inverse_ = 1 / (static_cast<double>(total_) + all_.prior_sum_ * all_.scale_);
    }
    const double likelihood = mass * inverse_;
    if (units != all_.scale_) {
      logarithm_ += units / all_.scale_ * portable_log(likelihood);
      return;
    }
    product_ *= likelihood;
    if (product_ < kLeastProduct) {
      logarithm_ += portable_log(product_);
      product_ = 1;
    }
  }

  void prefetch() const {
    const float* const own = all_.weights_of(tokens_[at_].word);
    for (size_t k = 0; k < std::min(all_.stride_, kMostPrefetched); k += kTopicLanes) __builtin_prefetch(own + k);
  }

  float share(size_t topic) const { return static_cast<float>(units_[topic]) + all_.priors_[topic]; }

  void add_to_priors(int64_t* sums) const {
    for (size_t topic = 0; topic < units_.size(); ++topic) {
      if (units_[topic] == 0) continue;
      const double occurrences = units_[topic] / all_.scale_;
      sums[topic] += fixed_point(digamma(all_.prior_values_[topic] + occurrences) - all_.prior_digammas_[topic]);
    }
    const double all = all_.prior_sum_ + static_cast<double>(total_) / all_.scale_;
    sums[all_.topics()] += fixed_point(digamma(all) - all_.prior_sum_digamma_);
  }

  const TopicWeights& all_;
  std::vector<int32_t> units_;  // of each topic in the document
  std::vector<float> shares_;   // of each topic: units and prior; stride_
  std::vector<Token> tokens_;   // of the document
  size_t at_ = 0;               // of the next token
  TokenRandom random_{{}, 0};
  uint16_t* topics_ = nullptr;
  int64_t total_ = 0;
  int32_t* count_ = nullptr;  // of the last token: still to be increased
  int32_t count_units_ = 0;
  int64_t others_ = -1;  // the units of the document without a token, and their inverse with the priors
  double inverse_ = 0;
  double product_ = 1, logarithm_ = 0;
};

int64_t count_tokens(const Documents& documents, double scale) {
  return count_tokens(documents, 0, documents.row_count, scale);
}

void count_topics(const Documents& documents, double scale, const uint16_t* topics, size_t topic_count,
                  int32_t* counts) {
  for (size_t row = 0; row < documents.row_count; ++row)
    for_each_token(documents, row, scale, [&](size_t word, int64_t units) {
      const uint16_t topic = *topics++;
      if (topic != kNoTopic) counts[word * topic_count + topic] += static_cast<int32_t>(units);
    });
}

void sample_topics(const TopicWeights& weights, const Documents& documents, const TopicDraw& draw, uint16_t* topics,
                   int32_t* counts, const TopicSums& sums) {
  const TopicKernels& kernels = *available_kernels().front()->topics;
  const size_t stride = weights.stride();
  const size_t drawn_at_once = std::clamp<size_t>(kMostCumulated / stride, 1, kMostDrawn);
  std::vector<float> cumulated(drawn_at_once * stride);
  std::vector<DocumentSampler> samplers(kDocumentsAtOnce, DocumentSampler(weights));
  std::vector<DocumentSampler*> active;  // those with a document
  size_t row = 0;
  const auto begin_next = [&](DocumentSampler& sampler) {
    while (row < documents.row_count) {
      const size_t own_row = row++;
      uint16_t* const own = topics;
      if ((draw.first_row + static_cast<int64_t>(own_row)) % draw.every != 0) {
        topics += count_tokens(documents, own_row, own_row + 1, weights.scale());
        continue;
      }
      const size_t tokens = sampler.begin(documents, own_row, TokenRandom(draw, own_row), own);
      topics += tokens;
      if (tokens > 0) return true;
    }
    return false;
  };
  for (DocumentSampler& sampler : samplers)
    if (begin_next(sampler)) active.push_back(&sampler);
  TopicDrawing drawings[kMostDrawn];
  while (!active.empty()) {
    size_t kept = 0;
    for (size_t first = 0; first < active.size(); first += drawn_at_once) {
      const size_t count = std::min(drawn_at_once, active.size() - first);
      for (size_t i = 0; i < count; ++i) drawings[i] = active[first + i]->leave_out();
      kernels.draw(drawings, count, stride / kTopicLanes, cumulated.data());
      for (size_t i = 0; i < count; ++i) {
        DocumentSampler* const sampler = active[first + i];
        if (sampler->take(drawings[i], counts, sums) || begin_next(*sampler)) active[kept++] = sampler;
      }
    }
    active.resize(kept);
  }
}

}  // namespace ronde
