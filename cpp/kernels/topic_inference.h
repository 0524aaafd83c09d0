// The topics of documents, given those of words: the E-step of variational Bayes for latent Dirichlet allocation, and
// predictions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/documents.h"

namespace ronde {

// How the topics of a document are found: gamma = prior + the expected occurrences of each topic, iterated. A topic's
// share in a word is in proportion to weight(word, topic) x w(gamma of the topic).
struct TopicInference {
  const double* weights;  // words x stride, positive; 0 behind the topics
  const double* priors;   // of the topics, positive
  size_t topics;
  size_t stride;  // a multiple of 16, at least the number of topics
  size_t max_iterations;
  double tolerance;     // the iteration ends when the mean change of gamma is below it
  bool is_variational;  // w(x) is exp(digamma(x)), and w(x) = x otherwise
};

// Fills `gammas`, row_count x topics. Documents are independent, so the result does not depend on how they are divided.
//
// `statistics`, words x topics, gets the expected occurrences of each word and topic added, in multiples of 2^-20:
// integers, whose sums are the same in any order. nullptr: not wanted.
void infer_topics(const TopicInference& inference, const Documents& documents, double* gammas, int64_t* statistics);

}  // namespace ronde
