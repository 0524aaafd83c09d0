// The Python binding of the inner loops of latent Dirichlet allocation, for ronde/ml/topics.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "binding/border.h"
#include "binding/require_arrays.h"
#include "kernels/topic_inference.h"
#include "kernels/topic_sampler.h"

namespace ronde {
namespace topics_binding {
namespace {

template <class T, int kDimensions>
using Array = nb::ndarray<T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;
using Offsets = Array<const int64_t, 1>;
using Words = Array<const int32_t, 1>;
using Doubles = Array<const double, 1>;
using Topics = Array<uint16_t, 1>;
using Counts = Array<int32_t, 2>;
using Sums = Array<int64_t, 1>;

constexpr size_t kMostTopics = kNoTopic;

// Checks what memory safety needs, in one pass over the entries.
Documents documents_of(const Offsets& offsets, const Words& words, const Doubles& counts, size_t word_count) {
  require_arrays(offsets.shape(0) > 0 && offsets.data()[0] == 0, "the offsets do not begin with 0");
  const size_t rows = offsets.shape(0) - 1, entries = words.shape(0);
  require_arrays(std::is_sorted(offsets.data(), offsets.data() + rows + 1), "an offset is less than the one before");
  require_arrays(static_cast<size_t>(offsets.data()[rows]) == entries && counts.shape(0) == entries,
                 "there is not one word and one count for each entry");
  bool is_valid = true;
  for (size_t entry = 0; entry < entries; ++entry) {
    const double count = counts.data()[entry];
    is_valid &= static_cast<uint32_t>(words.data()[entry]) < word_count && count >= 0 && count <= 0x1p31;
  }
  require_arrays(is_valid, "an entry has an unknown word, or a count that is negative, NaN or larger than 2^31");
  return {offsets.data(), words.data(), counts.data(), rows};
}

void check_tokens(const Documents& documents, double scale, const Topics& topics, size_t topic_count) {
  require_arrays(static_cast<int64_t>(topics.shape(0)) == count_tokens(documents, scale),
                 "there is not one topic for each token");
  require_arrays(std::all_of(topics.data(), topics.data() + topics.shape(0),
                             [&](uint16_t topic) { return topic < topic_count || topic == kNoTopic; }),
                 "a token has an unknown topic");
}

void check_scale(double scale) { require_arrays(scale >= 1 && scale <= 0x1p20, "the scale is out of range"); }

int64_t count(const Offsets& offsets, const Words& words, const Doubles& counts, size_t word_count, double scale) {
  check_scale(scale);
  const Documents documents = documents_of(offsets, words, counts, word_count);
  const ReleaseGil released;
  return count_tokens(documents, scale);
}

void make_weights(TopicWeights* self, const Array<const int32_t, 2>& counts, const Doubles& priors, double word_prior,
                  double scale) {
  check_scale(scale);
  const size_t topics = counts.shape(1);
  require_arrays(topics > 0 && topics <= kMostTopics, "there are no topics, or too many");
  require_arrays(priors.shape(0) == topics, "there is not one prior for each topic");
  require_arrays(word_prior > 0 && std::all_of(priors.data(), priors.data() + topics, [](double x) { return x > 0; }),
                 "a prior is not positive");
  const ReleaseGil released;
  new (self) TopicWeights(counts.data(), counts.shape(0), priors.data(), topics, word_prior, scale);
}

void sample(const TopicWeights& self, const Offsets& offsets, const Words& words, const Doubles& occurrences,
            uint64_t seed, uint64_t step, int64_t first_row, int64_t every, const Topics& topics, const Counts& counts,
            const Sums& log_likelihood, const std::optional<Sums>& priors) {
  require_arrays(counts.shape(0) == self.words() && counts.shape(1) == self.topics(), "the counts have another shape");
  require_arrays(first_row >= 0 && every > 0, "the numbers of rows are out of range");
  require_arrays(log_likelihood.shape(0) == 1, "the log-likelihood is not one number");
  require_arrays(!priors || priors->shape(0) == self.topics() + 1, "the sums of priors have another length");
  const Documents documents = documents_of(offsets, words, occurrences, self.words());
  check_tokens(documents, self.scale(), topics, self.topics());
  const ReleaseGil released;
  sample_topics(self, documents, {seed, step, first_row, every}, topics.data(), counts.data(),
                {log_likelihood.data(), priors ? priors->data() : nullptr});
}

void infer(const Offsets& offsets, const Words& words, const Doubles& counts, const Array<const double, 2>& weights,
           const Doubles& priors, size_t max_iterations, double tolerance, bool is_variational,
           const Array<double, 2>& gammas, const std::optional<Array<int64_t, 2>>& statistics) {
  const size_t word_count = weights.shape(0), stride = weights.shape(1), topics = priors.shape(0);
  require_arrays(topics > 0 && topics <= stride && stride % 16 == 0, "the weights have another shape");
  const Documents documents = documents_of(offsets, words, counts, word_count);
  require_arrays(gammas.shape(0) == documents.row_count && gammas.shape(1) == topics, "the gammas have another shape");
  require_arrays(!statistics || (statistics->shape(0) == word_count && statistics->shape(1) == topics),
                 "the statistics have another shape");
  const TopicInference inference{weights.data(), priors.data(), topics,        stride,
                                 max_iterations, tolerance,     is_variational};
  const ReleaseGil released;
  infer_topics(inference, documents, gammas.data(), statistics ? statistics->data() : nullptr);
}

}  // namespace
}  // namespace topics_binding

void bind_topics(nb::module_& module) {
  using namespace topics_binding;
  using namespace nb::literals;
  module.def("count_tokens", &count, "offsets"_a.noconvert(), "words"_a.noconvert(), "counts"_a.noconvert(),
             "word_count"_a, "scale"_a);
  module.def("infer_topics", &infer, "offsets"_a.noconvert(), "words"_a.noconvert(), "counts"_a.noconvert(),
             "weights"_a.noconvert(), "priors"_a.noconvert(), "max_iterations"_a, "tolerance"_a, "is_variational"_a,
             "gammas"_a.noconvert(), "statistics"_a.none().noconvert());
  nb::class_<TopicWeights>(module, "TopicWeights")
      .def("__init__", &make_weights, "counts"_a.noconvert(), "priors"_a.noconvert(), "word_prior"_a, "scale"_a)
      .def("sample", &sample, "offsets"_a.noconvert(), "words"_a.noconvert(), "occurrences"_a.noconvert(), "seed"_a,
           "step"_a, "first_row"_a, "every"_a, "topics"_a.noconvert(), "counts"_a.noconvert(),
           "log_likelihood"_a.noconvert(), "priors"_a.none().noconvert());
}

}  // namespace ronde
