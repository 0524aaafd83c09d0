// The inner loop of latent Dirichlet allocation by sampling: a topic for each token of some documents.
//
// An entry of a document stands for tokens of equal words. Counts are integers in units: a word that occurs once has
// `scale` units. So their sums are the same in any order, and the result does not depend on how documents are divided.
// Random numbers depend on the seed, the step, the number of the document and the place of the token in it only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels/documents.h"

namespace ronde {

// An entry with more occurrences than this is sampled as this number of tokens with several units each.
constexpr int64_t kMostTokens = 64;

// Which random numbers a call uses.
struct TopicDraw {
  uint64_t seed;
  uint64_t step;
  int64_t first_row;  // the number of the first document among all
  int64_t every = 1;  // only documents whose number is a multiple of it are read
};

constexpr uint16_t kNoTopic = 0xFFFF;  // of a token that has none yet

// The weights of topics in a step, from the counts of the last one.
class TopicWeights {
 public:
  // `counts`: words x topics, in units. `priors`: of the topics in a document, in occurrences. `word_prior`: of a word
  // in a topic, in occurrences. `scale`: units of an occurrence.
  TopicWeights(const int32_t* counts, size_t words, const double* priors, size_t topics, double word_prior,
               double scale);

  size_t words() const { return words_; }
  size_t topics() const { return prior_values_.size(); }
  double scale() const { return scale_; }
  // Topics, and some zeros behind them.
  size_t stride() const { return stride_; }

 private:
  friend class DocumentSampler;

  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };

  float* allocate(size_t count);
  const float* weights_of(size_t word) const { return weights_.get() + word * stride_; }

  std::unique_ptr<float, Free> weights_;  // words x stride_: of a word in a topic
  std::vector<float> totals_;             // of a topic: its counts with their priors
  std::vector<float> priors_;             // of a topic in a document, in units; stride_
  std::vector<double> prior_values_, prior_digammas_;
  double prior_sum_ = 0, prior_sum_digamma_;
  size_t words_, stride_;  // topics and some zeros
  float word_prior_;
  double scale_;
};

// Sums over documents, in multiples of 2^-20.
struct TopicSums {
  int64_t* log_likelihood;  // one number: of each token, given the other tokens of its document
  int64_t* priors;          // topics + 1, for `next_prior`: of each topic, and of all; nullptr: not wanted
};

// Returns the number of tokens of documents.
int64_t count_tokens(const Documents& documents, double scale);

// Adds the units of all tokens with topics to `counts`, words x topic_count.
void count_topics(const Documents& documents, double scale, const uint16_t* topics, size_t topic_count,
                  int32_t* counts);

// Draws a new topic for each token, given those of all other tokens: the topics of its document as they are now, those
// of other documents as they were at the end of the last step. Adds the new ones to `counts`, words x topics. Tokens
// that have no topic yet get one given the tokens before them.
void sample_topics(const TopicWeights& weights, const Documents& documents, const TopicDraw& draw, uint16_t* topics,
                   int32_t* counts, const TopicSums& sums);

// The logarithm and the derivative of the logarithm of the gamma function, for positive finite numbers; with the same
// bits on all processors, unlike those of the C library.
double portable_log(double x);
double digamma(double x);

}  // namespace ronde
