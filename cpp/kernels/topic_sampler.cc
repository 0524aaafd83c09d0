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
constexpr size_t kDocumentsAtOnce = 8;   // so that the processor need not wait for memory or for the last draw
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
class DocumentSampler {
 public:
  explicit DocumentSampler(const TopicWeights& weights)
      : all_(weights),
        kernels_(*available_kernels().front()->topics),
        units_(weights.topics()),
        shares_(weights.stride_),
        cumulated_(weights.stride_) {}

  // Begins a document with at least one token.
  void begin(const Documents& documents, size_t row, TokenRandom random, uint16_t* topics) {
    documents_ = &documents;
    random_ = random;
    topics_ = topics;
    std::fill(units_.begin(), units_.end(), 0);
    total_ = 0;
    for_each_token(documents, row, all_.scale_, [&](size_t, int64_t units) {
      const uint16_t topic = *topics++;
      if (topic == kNoTopic) return;
      units_[topic] += static_cast<int32_t>(units);
      total_ += units;
    });
    std::copy(all_.priors_.begin(), all_.priors_.end(), shares_.begin());
    for (size_t k = 0; k < units_.size(); ++k) shares_[k] += static_cast<float>(units_[k]);
    prior_units_ = all_.prior_sum_ * all_.scale_;
    product_ = 1;
    logarithm_ = 0;
    entry_ = documents.offsets[row];
    end_ = documents.offsets[row + 1];
    token_ = 0;
    begin_entry();
  }

  // Draws the topic of the next token. Returns whether the document has more of them.
  bool sample_one(int32_t* counts, const TopicSums& sums) {
    const int64_t units = tokens_.units_of(token_);
    const uint16_t old_topic = *topics_;
    if (old_topic != kNoTopic) total_ -= units;
    double mass;
    const uint16_t topic = draw(word_, old_topic, static_cast<int32_t>(units), random_.uniform(), mass);
    *topics_++ = topic;
    count(&counts[word_ * all_.topics() + topic], static_cast<int32_t>(units));
    add_likelihood(mass / (static_cast<double>(total_) + prior_units_), static_cast<double>(units));
    total_ += units;
    if (++token_ < tokens_.count) return true;
    ++entry_;
    token_ = 0;
    begin_entry();
    if (entry_ < end_) return true;
    count(nullptr, 0);
    *sums.log_likelihood += fixed_point(logarithm_ + portable_log(product_));
    if (sums.priors != nullptr) add_to_priors(sums.priors);
    return false;
  }

 private:
  // Goes to the next entry with tokens, from entry_ on.
  void begin_entry() {
    for (; entry_ < end_; ++entry_) {
      tokens_ = EntryTokens(documents_->counts[entry_], all_.scale_);
      if (tokens_.count > 0) break;
    }
    if (entry_ == end_) return;
    word_ = static_cast<size_t>(documents_->words[entry_]);
    prefetch();
  }

  // Adds the units of the last token to its count, and fetches the count of this one.
  void count(int32_t* next, int32_t units) {
    if (count_ != nullptr) *count_ += count_units_;
    count_ = next;
    count_units_ = units;
    if (next != nullptr) __builtin_prefetch(next, 1);
  }

  void add_likelihood(double likelihood, double units) {
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
    const float* const own = all_.weights_of(word_);
    for (size_t k = 0; k < std::min(all_.stride_, kMostPrefetched); k += kTopicLanes) __builtin_prefetch(own + k);
  }

  float share(size_t topic) const { return static_cast<float>(units_[topic]) + all_.priors_[topic]; }

  // Draws a topic for a token of a word, with probabilities in proportion to weight x (units in the document + prior),
  // and gives it the token. `mass`: the sum of these. The weight of the token's old topic leaves out the token.
  uint16_t draw(size_t word, uint16_t old_topic, int32_t units, float uniform, double& mass) {
    const float* const own = all_.weights_of(word);
    if (old_topic != kNoTopic) leave_out(own[old_topic], old_topic, units);
    float sum;
    uint32_t topic = kernels_.draw(own, shares_.data(), all_.stride_ / kTopicLanes, uniform, cumulated_.data(), &sum);
    if (topic >= units_.size()) topic = old_topic != kNoTopic ? old_topic : 0;  // of rounding
    mass = static_cast<double>(sum);
    if (old_topic != kNoTopic) shares_[old_topic] = share(old_topic);
    units_[topic] += units;
    shares_[topic] = share(topic);
    return static_cast<uint16_t>(topic);
  }

  // Makes weight x share the product without a token of the topic.
  void leave_out(float weight, uint16_t topic, int32_t units) {
    const float total = all_.totals_[topic], own_units = static_cast<float>(units);
    const float others = std::max(weight * total - own_units, all_.word_prior_);
    units_[topic] -= units;
    shares_[topic] = share(topic) * (others / (std::max(total - own_units, others) * weight));
  }

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
  const TopicKernels& kernels_;
  std::vector<int32_t> units_;  // of each topic in the document
  std::vector<float> shares_;   // of each topic: units and prior; stride_
  std::vector<float> cumulated_;

  // The document, and the next token.
  const Documents* documents_ = nullptr;
  TokenRandom random_{{}, 0};
  uint16_t* topics_ = nullptr;
  int64_t total_ = 0, entry_ = 0, end_ = 0, token_ = 0;
  EntryTokens tokens_{0, 1};
  size_t word_ = 0;
  int32_t* count_ = nullptr;  // of the last token: still to be increased
  int32_t count_units_ = 0;
  double product_ = 1, logarithm_ = 0, prior_units_ = 0;
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
  std::vector<DocumentSampler> samplers(kDocumentsAtOnce, DocumentSampler(weights));
  std::vector<DocumentSampler*> active;  // those with a document
  size_t row = 0;
  const auto begin_next = [&](DocumentSampler& sampler) {
    for (; row < documents.row_count; ++row) {
      const int64_t tokens = count_tokens(documents, row, row + 1, weights.scale());
      uint16_t* const own = topics;
      topics += tokens;
      if (tokens == 0 || (draw.first_row + static_cast<int64_t>(row)) % draw.every != 0) continue;
      sampler.begin(documents, row, TokenRandom(draw, row), own);
      ++row;
      return true;
    }
    return false;
  };
  for (DocumentSampler& sampler : samplers)
    if (begin_next(sampler)) active.push_back(&sampler);
  while (!active.empty())
    for (size_t i = 0; i < active.size(); ++i)
      if (!active[i]->sample_one(counts, sums) && !begin_next(*active[i])) {
        active[i--] = active.back();
        active.pop_back();
      }
}

}  // namespace ronde
