// The Python binding of the vocabulary and the training of Word2Vec, for ronde/ml/words.
//
// Each object belongs to one thread at a time.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "binding/border.h"
#include "binding/require_arrays.h"
#include "words/word_table.h"
#include "words/word_trainer.h"

namespace ronde {
namespace {

using Text = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Vectors = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using RowSums = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr char kSeparator = '\x1f';

std::string_view view(const Text& text) { return {reinterpret_cast<const char*>(text.data()), text.shape(0)}; }

TextForm form_of(bool is_lines) { return is_lines ? TextForm::kLines : TextForm::kParts; }

std::span<const int64_t> span_of(const Numbers& numbers) { return {numbers.data(), numbers.shape(0)}; }

void add_counts(WordTable& table, const Text& words, const Counts& counts) {
  WordReader reader(view(words), TextForm::kParts);
  size_t number = 0;
  for (; number < counts.shape(0) && reader.next() == WordReader::Item::kWord; ++number) {
    table.add(reader.word(), counts.data()[number]);
  }
  require_arrays(number == counts.shape(0), "there is not one word for each count");
}

nb::bytes words_of(const WordTable& table) {
  std::string joined;
  for (size_t number = 0; number < table.size(); ++number) {
    joined.append(table.word(number));
    joined.push_back(kSeparator);
  }
  return nb::bytes(joined.data(), joined.size());
}

void counts_of(const WordTable& table, const nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& counts) {
  require_arrays(counts.shape(0) == table.size(), "there is not one count for each word");
  for (size_t number = 0; number < table.size(); ++number) counts.data()[number] = table.count(number);
}

// A trainer with the shards of a task and the arrays that it uses.
class ShardTrainer {
 public:
  ShardTrainer(const WordOptions& options, const Counts& counts, const Vectors& vectors, const Vectors& outputs)
      : vectors_(vectors), outputs_(outputs), trainer_(options, span_of(counts), vectors.data(), outputs.data()) {}

  void add_shard(const WordTable& table, const Text& text, bool is_lines, uint64_t number) {
    const ReleaseGil released;
    shards_.emplace_back(number, encode(table, view(text), form_of(is_lines)));
  }

  // The loss in units of 2^-20, so that its sum does not depend on the order of shards; and of how many predictions.
  std::pair<int64_t, int64_t> train(uint64_t epoch, size_t part, size_t parts, float rate, float last_rate) {
    constexpr double kUnits = 0x1p20;
    const ReleaseGil released;
    int64_t sum = 0, count = 0;
    for (const auto& [number, shard] : shards_) {
      const auto [first, last] = part_of(shard, part, parts);
      const WordTrainer::Loss loss = trainer_.train(shard, number, first, last, epoch, rate, last_rate);
      sum += static_cast<int64_t>(loss.sum * kUnits);
      count += loss.count;
    }
    return {sum, count};
  }

  size_t sums_per_row() { return trainer_.vectors().sums_per_row(); }

  void changed(bool is_outputs, const nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& changed) {
    const auto found = rows(is_outputs).changed();
    require_arrays(changed.shape(0) == found.size(), "there is not one place for each row");
    std::copy(found.begin(), found.end(), changed.data());
  }

  void take(bool is_outputs, const Numbers& numbers, const RowSums& sums) {
    check(is_outputs, numbers);
    check_sums(is_outputs, numbers, sums);
    const ReleaseGil released;
    rows(is_outputs).take(span_of(numbers), sums.data());
  }

  void put(bool is_outputs, const Numbers& numbers, const RowSums& sums) {
    check(is_outputs, numbers);
    check_sums(is_outputs, numbers, sums);
    const ReleaseGil released;
    rows(is_outputs).put(span_of(numbers), sums.data());
  }

  void apply(const Numbers& vectors, const Numbers& outputs, float rate) {
    check(false, vectors);
    check(true, outputs);
    const ReleaseGil released;
    trainer_.apply(span_of(vectors), span_of(outputs), rate);
  }

 private:
  SharedRows& rows(bool is_outputs) { return is_outputs ? trainer_.outputs() : trainer_.vectors(); }

  void check(bool is_outputs, const Numbers& numbers) {
    const size_t count = rows(is_outputs).changed().size();
    for (const int64_t number : span_of(numbers)) {
      require_arrays(number >= 0 && static_cast<size_t>(number) < count, "there is no row of that number");
    }
  }

  void check_sums(bool is_outputs, const Numbers& numbers, const RowSums& sums) {
    require_arrays(sums.shape(0) == numbers.shape(0) && sums.shape(1) == rows(is_outputs).sums_per_row(),
                   "the sums have another shape");
  }

  const Vectors vectors_, outputs_;
  WordTrainer trainer_;
  std::vector<std::pair<uint64_t, EncodedShard>> shards_;
};

void make_trainer(ShardTrainer* self, const Counts& counts, const Vectors& vectors, const Vectors& outputs,
                  size_t window, size_t negative, bool is_cbow, bool shrinks_window, double sample, double ns_exponent,
                  uint64_t seed, size_t shards) {
  const size_t words = counts.shape(0), width = vectors.shape(1);
  require_arrays(words > 0 && words < INT32_MAX, "there are no words, or too many");
  require_arrays(vectors.shape(0) == words, "there is not one vector for each word");
  require_arrays(outputs.shape(0) == (negative > 0 || words < 2 ? words : words - 1),
                 "outputs have another number of rows");
  require_arrays(width > 0 && width % kWordLanes == 0 && outputs.shape(1) == width, "vectors have another length");
  require_arrays(window > 0 && window < INT32_MAX, "the window is empty");
  require_arrays(shards > 0 && shards < INT32_MAX, "there are no shards, or too many");
  const WordOptions options{width, window, negative, is_cbow, shrinks_window, sample, ns_exponent, shards, seed};
  new (self) ShardTrainer(options, counts, vectors, outputs);
}

}  // namespace

void bind_words(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<WordTable>(module, "WordTable")
      .def(nb::init<>())
      .def("__len__", &WordTable::size)
      .def(
          "add_text",
          [](WordTable& self, const Text& text, bool is_lines) {
            const ReleaseGil released;
            self.add_text(view(text), form_of(is_lines));
          },
          "text"_a.noconvert(), "is_lines"_a)
      .def("add_counts", &add_counts, "words"_a.noconvert(), "counts"_a.noconvert())
      .def("words", &words_of)
      .def("counts", &counts_of, "counts"_a.noconvert());
  nb::class_<ShardTrainer>(module, "WordTrainer")
      .def("__init__", &make_trainer, "counts"_a.noconvert(), "vectors"_a.noconvert(), "outputs"_a.noconvert(),
           nb::kw_only(), "window"_a, "negative"_a, "is_cbow"_a, "shrinks_window"_a, "sample"_a, "ns_exponent"_a,
           "seed"_a, "shards"_a)
      .def_ro_static("lanes", &kWordLanes)
      .def("add_shard", &ShardTrainer::add_shard, "table"_a, "text"_a.noconvert(), "is_lines"_a, "number"_a)
      .def("train", &ShardTrainer::train, "epoch"_a, "part"_a, "parts"_a, "rate"_a, "last_rate"_a)
      .def("sums_per_row", &ShardTrainer::sums_per_row)
      .def("changed", &ShardTrainer::changed, "is_outputs"_a, "changed"_a.noconvert())
      .def("take", &ShardTrainer::take, "is_outputs"_a, "numbers"_a.noconvert(), "sums"_a.noconvert())
      .def("put", &ShardTrainer::put, "is_outputs"_a, "numbers"_a.noconvert(), "sums"_a.noconvert())
      .def("apply", &ShardTrainer::apply, "vectors"_a.noconvert(), "outputs"_a.noconvert(), "rate"_a);
}

}  // namespace ronde
