// The topics that the sampler draws: how often, against probabilities computed in plain loops; the same ones however
// documents are divided and for all instruction sets. And the E-step of variational Bayes at its fixed point.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/reduce_kernels.h"
#include "kernels/topic_inference.h"
#include "kernels/topic_sampler.h"

namespace ronde {
namespace {

std::mt19937_64 generator(20261128);

// Exactly as many elements as there are, so that AddressSanitizer detects accesses behind them.
struct Corpus {
  std::vector<int64_t> offsets{0};
  std::vector<int32_t> words;
  std::vector<double> counts;

  Documents documents() const { return {offsets.data(), words.data(), counts.data(), offsets.size() - 1}; }

  void add(const std::vector<std::pair<int32_t, double>>& entries) {
    for (const auto& [word, count] : entries) {
      words.push_back(word);
      counts.push_back(count);
    }
    offsets.push_back(static_cast<int64_t>(words.size()));
  }

  // The documents from `begin` on, before `end`.
  Corpus part(size_t begin, size_t end) const {
    Corpus part;
    for (size_t row = begin; row < end; ++row) {
      std::vector<std::pair<int32_t, double>> entries;
      for (int64_t entry = offsets[row]; entry < offsets[row + 1]; ++entry)
        entries.emplace_back(words[entry], counts[entry]);
      part.add(entries);
    }
    return part;
  }
};

constexpr size_t kWords = 30;

Corpus random_corpus(size_t rows, double unit) {
  std::uniform_int_distribution<int> length(0, 12), word(0, kWords - 1), count(0, 3);
  Corpus corpus;
  for (size_t row = 0; row < rows; ++row) {
    std::vector<std::pair<int32_t, double>> entries;
    for (int left = length(generator); left > 0; --left) entries.emplace_back(word(generator), count(generator) * unit);
    corpus.add(entries);
  }
  corpus.add({{3, 1000}, {4, 200}});  // more tokens than are kept
  return corpus;
}

struct Chain {
  const Corpus& corpus;
  size_t topic_count;
  double scale;
  int64_t first_row = 0;
  std::vector<uint16_t> topics{};
  std::vector<int32_t> counts{};
  int64_t log_likelihood = 0;
  std::vector<int64_t> priors{};

  void begin() {
    topics.assign(count_tokens(corpus.documents(), scale), kNoTopic);
    counts.assign(kWords * topic_count, 0);
  }

  void sample(const TopicWeights& weights, uint64_t seed, uint64_t step) {
    counts.assign(kWords * topic_count, 0);
    priors.assign(topic_count + 1, 0);
    log_likelihood = 0;
    sample_topics(weights, corpus.documents(), {seed, step, first_row}, topics.data(), counts.data(),
                  {&log_likelihood, priors.data()});
  }
};

void test_counts_are_those_of_the_topics() {
  for (double scale : {1.0, 64.0})
    for (size_t topic_count : {1u, 5u, 16u, 40u}) {
      const Corpus corpus = random_corpus(50, scale == 1 ? 1 : 0.37);
      Chain chain{corpus, topic_count, scale};
      chain.begin();
      const std::vector<double> prior(topic_count, 0.1);
      for (uint64_t step = 1; step < 4; ++step) {
        const TopicWeights weights(chain.counts.data(), kWords, prior.data(), topic_count, 0.01, scale);
        chain.sample(weights, 1, step);
        std::vector<int32_t> expected(chain.counts.size());
        count_topics(corpus.documents(), scale, chain.topics.data(), topic_count, expected.data());
        CHECK(chain.counts == expected);
        CHECK(*std::max_element(chain.topics.begin(), chain.topics.end()) < topic_count);
        CHECK(chain.log_likelihood < 0);
      }
      const int64_t units = std::accumulate(chain.counts.begin(), chain.counts.end(), int64_t{0});
      double occurrences = 0;
      for (double count : corpus.counts) occurrences += std::max(count > 0 ? 1.0 : 0.0, std::round(count * scale));
      CHECK(static_cast<double>(units) == occurrences);
    }
}

void test_only_the_documents_that_are_asked_for_get_topics() {
  const Corpus corpus = random_corpus(40, 1);
  Chain chain{corpus, 3, 1, 10};
  chain.begin();
  const std::vector<double> prior(3, 0.5);
  const TopicWeights weights(chain.counts.data(), kWords, prior.data(), 3, 0.1, 1);
  chain.priors.assign(4, 0);
  sample_topics(weights, corpus.documents(), {1, 1, 10, 4}, chain.topics.data(), chain.counts.data(),
                {&chain.log_likelihood, nullptr});
  auto topic = chain.topics.begin();
  for (size_t row = 0; row < corpus.documents().row_count; ++row)
    for (int64_t left = count_tokens(corpus.part(row, row + 1).documents(), 1); left > 0; --left)
      CHECK((*topic++ == kNoTopic) == ((10 + row) % 4 != 0));
  std::vector<int32_t> expected(chain.counts.size());
  count_topics(corpus.documents(), 1, chain.topics.data(), 3, expected.data());
  CHECK(chain.counts == expected);
}

void test_the_division_of_documents_has_no_effect() {
  const Corpus corpus = random_corpus(61, 1);
  const size_t topic_count = 7;
  const std::vector<double> prior(topic_count, 0.3);
  Chain whole{corpus, topic_count, 1};
  whole.begin();
  const TopicWeights weights(whole.counts.data(), kWords, prior.data(), topic_count, 0.1, 1);
  whole.sample(weights, 5, 1);
  std::vector<uint16_t> topics;
  std::vector<int32_t> counts(whole.counts.size());
  std::vector<int64_t> priors(topic_count + 1);
  int64_t log_likelihood = 0;
  for (size_t begin : {0u, 1u, 20u, 43u}) {
    const size_t end = begin == 0 ? 1 : begin == 1 ? 20 : begin == 20 ? 43 : corpus.documents().row_count;
    const Corpus part = corpus.part(begin, end);
    Chain chain{part, topic_count, 1, static_cast<int64_t>(begin)};
    chain.begin();
    chain.sample(weights, 5, 1);
    topics.insert(topics.end(), chain.topics.begin(), chain.topics.end());
    for (size_t i = 0; i < counts.size(); ++i) counts[i] += chain.counts[i];
    for (size_t k = 0; k < priors.size(); ++k) priors[k] += chain.priors[k];
    log_likelihood += chain.log_likelihood;
  }
  CHECK(topics == whole.topics);
  CHECK(counts == whole.counts);
  CHECK(priors == whole.priors);
  CHECK(log_likelihood == whole.log_likelihood);
}

// The topics of a document with one other token: each topic as often as its probability says.
void test_topics_have_their_probabilities() {
  const size_t topic_count = 20, draws = 40'000;
  std::vector<int32_t> counts(kWords * topic_count);
  std::uniform_int_distribution<int> any(0, 9);
  for (int32_t& count : counts) count = any(generator);
  std::vector<double> prior(topic_count);
  for (size_t k = 0; k < topic_count; ++k) prior[k] = 0.1 + 0.05 * static_cast<double>(k);
  const TopicWeights weights(counts.data(), kWords, prior.data(), topic_count, 0.5, 1);
  Corpus corpus;
  for (size_t row = 0; row < draws; ++row) corpus.add({{2, 1}, {9, 1}});
  Chain chain{corpus, topic_count, 1};
  chain.begin();
  for (size_t row = 0; row < draws; ++row) chain.topics[2 * row] = chain.topics[2 * row + 1] = 4;
  chain.sample(weights, 3, 1);

  std::vector<double> totals(topic_count, 0.5 * kWords), expected(topic_count);
  for (size_t w = 0; w < kWords; ++w)
    for (size_t k = 0; k < topic_count; ++k) totals[k] += counts[w * topic_count + k];
  double sum = 0;
  for (size_t k = 0; k < topic_count; ++k) {
    const int own = k == 4 ? 1 : 0;  // the other token has topic 4; so had this one
    expected[k] = std::max(counts[2 * topic_count + k] - own + 0.5, 0.5) / (totals[k] - own) * (prior[k] + own);
    sum += expected[k];
  }
  std::vector<double> found(topic_count);
  for (size_t row = 0; row < draws; ++row) found[chain.topics[2 * row]] += 1;
  double chi_square = 0;
  for (size_t k = 0; k < topic_count; ++k) {
    const double mean = expected[k] / sum * draws;
    chi_square += (found[k] - mean) * (found[k] - mean) / mean;
  }
  CHECK(chi_square < 50);  // 19 degrees of freedom: 1 of 7,000 would be above
}

std::vector<float> random_numbers(size_t count, float share_of_zeros) {
  std::uniform_real_distribution<float> uniform(0, 1);
  std::vector<float> numbers(count);
  for (float& number : numbers) number = uniform(generator) < share_of_zeros ? 0 : uniform(generator);
  return numbers;
}

// Several draws in a call have the same results as one after the other.
void test_all_instruction_sets_draw_the_same_topics() {
  for (size_t rows : {1u, 2u, 7u, 33u})
    for (size_t count : {1u, 5u, 8u, 11u}) {
      const size_t stride = rows * kTopicLanes;
      const std::vector<float> weights = random_numbers(count * stride, 0),
                               shares = random_numbers(count * stride, 0.5);
      std::vector<float> places = random_numbers(count, 0), cumulated(count * stride);
      std::vector<TopicDrawing> drawings, expected;
      for (size_t d = 0; d < count; ++d)
        drawings.push_back({weights.data() + d * stride, shares.data() + d * stride, places[d] * 0.999f, 0, 0});
      for (TopicDrawing drawing : drawings) {
        available_kernels().front()->topics->draw(&drawing, 1, rows, cumulated.data());
        double mass = 0;
        for (size_t i = 0; i < stride; ++i) mass += drawing.weights[i] * drawing.shares[i];
        CHECK(std::abs(drawing.mass - mass) < 1e-3);
        CHECK(mass == 0 || (drawing.topic < stride && drawing.shares[drawing.topic] > 0));
        expected.push_back(drawing);
      }
      for (const Kernels* kernels : available_kernels()) {
        kernels->topics->draw(drawings.data(), count, rows, cumulated.data());
        for (size_t d = 0; d < count; ++d)
          CHECK(drawings[d].topic == expected[d].topic && drawings[d].mass == expected[d].mass);
      }
    }
}

void test_all_instruction_sets_give_the_same_sums() {
  for (size_t rows : {1u, 2u, 7u, 33u}) {
    std::uniform_real_distribution<double> uniform(0, 1);
    std::vector<double> a(rows * kTopicLanes), b(a.size());
    for (double& x : a) x = uniform(generator);
    for (double& x : b) x = uniform(generator);
    const TopicKernels& first = *available_kernels().front()->topics;
    const double expected = std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
    CHECK(std::abs(first.dot(a.data(), b.data(), rows) - expected) < 1e-9);
    for (const Kernels* kernels : available_kernels()) {
      const TopicKernels& other = *kernels->topics;
      CHECK(other.dot(a.data(), b.data(), rows) == first.dot(a.data(), b.data(), rows));
      std::vector<double> sums = a, other_sums = a;
      first.add_scaled(sums.data(), b.data(), 1.7, rows);
      other.add_scaled(other_sums.data(), b.data(), 1.7, rows);
      CHECK(sums == other_sums);
    }
  }
}

void test_inferred_topics_are_a_fixed_point() {
  const size_t topics = 5, stride = 16;
  Corpus corpus = random_corpus(20, 1);
  std::uniform_real_distribution<double> uniform(0.01, 1);
  std::vector<double> weights(kWords * stride), priors(topics);
  for (size_t w = 0; w < kWords; ++w)
    for (size_t k = 0; k < topics; ++k) weights[w * stride + k] = uniform(generator);
  for (double& prior : priors) prior = uniform(generator);
  const Documents documents = corpus.documents();
  for (bool is_variational : {true, false}) {
    std::vector<double> gammas(documents.row_count * topics);
    std::vector<int64_t> statistics(kWords * topics);
    infer_topics({weights.data(), priors.data(), topics, stride, 20'000, 1e-13, is_variational}, documents,
                 gammas.data(), statistics.data());
    double occurrences = 0;
    for (size_t row = 0; row < documents.row_count; ++row) {
      const double* gamma = gammas.data() + row * topics;
      std::vector<double> expected = priors, shares(topics);
      for (size_t k = 0; k < topics; ++k) shares[k] = is_variational ? std::exp(digamma(gamma[k])) : gamma[k];
      for (int64_t entry = corpus.offsets[row]; entry < corpus.offsets[row + 1]; ++entry) {
        const double* own = weights.data() + static_cast<size_t>(corpus.words[entry]) * stride;
        const double all = std::inner_product(shares.begin(), shares.end(), own, 0.0);
        for (size_t k = 0; k < topics; ++k) expected[k] += corpus.counts[entry] * own[k] * shares[k] / all;
        occurrences += corpus.counts[entry];
      }
      for (size_t k = 0; k < topics; ++k) CHECK(std::abs(expected[k] - gamma[k]) < 1e-5 * (1 + gamma[k]));
    }
    const double sum = static_cast<double>(std::accumulate(statistics.begin(), statistics.end(), int64_t{0}));
    CHECK(std::abs(sum / (1 << 20) - occurrences) < 1e-2);
  }
}

void test_the_logarithm_and_digamma() {
  for (double x : {1e-300, 1e-9, 0.01, 0.5, 0.7071, 1.0, 1.5, 2.0, 1e5, 1e300}) {
    CHECK(std::abs(portable_log(x) - std::log(x)) <= 1e-14 * (1 + std::abs(std::log(x))));
  }
  CHECK(std::abs(digamma(1) + 0.57721566490153286) < 1e-12);
  CHECK(std::abs(digamma(0.5) + 1.9635100260214235) < 1e-12);
  CHECK(std::abs(digamma(1e6) - std::log(1e6) + 0.5e-6) < 1e-11);
}

void test_no_documents() {
  Corpus corpus;
  Chain chain{corpus, 3, 1};
  chain.begin();
  const std::vector<double> prior(3, 1.0);
  const TopicWeights weights(chain.counts.data(), kWords, prior.data(), 3, 1, 1);
  chain.sample(weights, 1, 1);
  CHECK(chain.log_likelihood == 0);
}

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_counts_are_those_of_the_topics();
  ronde::test_only_the_documents_that_are_asked_for_get_topics();
  ronde::test_the_division_of_documents_has_no_effect();
  ronde::test_topics_have_their_probabilities();
  ronde::test_all_instruction_sets_draw_the_same_topics();
  ronde::test_all_instruction_sets_give_the_same_sums();
  ronde::test_inferred_topics_are_a_fixed_point();
  ronde::test_the_logarithm_and_digamma();
  ronde::test_no_documents();
}
