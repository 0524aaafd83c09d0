// Words: their table, and that training does not depend on the instruction set, nor on which trainer has which shards.
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "kernels/reduce_kernels.h"
#include "words/word_table.h"
#include "words/word_trainer.h"

namespace ronde {
namespace {

std::mt19937_64 generator(20261128);

std::vector<float> random_floats(size_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> floats(count);
  for (float& each : floats) each = normal(generator);
  return floats;
}

struct Batch {
  size_t width, input_count, output_count;
  std::vector<float> rows, labels, slopes;
  std::vector<float*> pointers;

  Batch(size_t width, size_t input_count, size_t output_count)
      : width(width),
        input_count(input_count),
        output_count(output_count),
        rows(random_floats(width * (input_count + output_count))),
        labels(output_count),
        slopes(word_slopes(input_count, output_count)) {
    for (size_t j = 0; j < output_count; ++j) labels[j] = static_cast<float>(j % 3 == 0);
  }

  std::vector<float> trained(const WordKernels& kernels) {
    std::vector<float> result = rows;
    pointers.clear();
    for (size_t i = 0; i < input_count + output_count; ++i) pointers.push_back(result.data() + i * width);
    kernels.train({pointers.data(), input_count, pointers.data() + input_count, labels.data(), output_count, width,
                   0.125f, slopes.data()});
    return result;
  }

  double logit(size_t i, size_t j) const {
    double sum = 0;
    for (size_t k = 0; k < width; ++k)
      sum += static_cast<double>(rows[i * width + k]) * rows[(input_count + j) * width + k];
    return sum;
  }
};

bool are_equal(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void test_slopes_are_those_of_the_logistic_loss() {
  Batch batch(32, 3, 7);
  batch.trained(best_word_kernels());
  for (size_t i = 0; i < batch.input_count; ++i) {
    for (size_t j = 0; j < batch.output_count; ++j) {
      const double expected = 0.125 * (batch.labels[j] - 1 / (1 + std::exp(-batch.logit(i, j))));
      CHECK(std::fabs(static_cast<double>(batch.slopes[i * batch.output_count + j]) - expected) < 1e-6);
    }
  }
}

void test_vectors_move_along_their_slopes() {
  Batch batch(16, 1, 5);
  const std::vector<float> moved = batch.trained(best_word_kernels());
  for (size_t k = 0; k < batch.width; ++k) {
    double input = batch.rows[k];
    for (size_t j = 0; j < 5; ++j) {
      input += static_cast<double>(batch.slopes[j]) * batch.rows[(1 + j) * batch.width + k];
      const double output = static_cast<double>(batch.rows[(1 + j) * batch.width + k]) +
                            static_cast<double>(batch.slopes[j]) * batch.rows[k];
      CHECK(std::fabs(static_cast<double>(moved[(1 + j) * batch.width + k]) - output) < 1e-5);
    }
    CHECK(std::fabs(static_cast<double>(moved[k]) - input) < 1e-5);
  }
}

void test_all_instruction_sets_give_the_same_bits() {
  for (const size_t inputs : {1, 2, 3, 9}) {
    for (const size_t outputs : {1, 2, 3, 5, 6, 7, 11, 26}) {
      Batch batch(48, inputs, outputs);
      const std::vector<float> expected = batch.trained(*available_kernels().back()->words);
      for (const Kernels* kernels : available_kernels()) CHECK(are_equal(batch.trained(*kernels->words), expected));
    }
  }
}

void test_changes_in_all_instruction_sets() {
  const std::vector<float> before = random_floats(32), factors = random_floats(32);
  std::vector<float> now = before;
  for (size_t i = 0; i < now.size(); ++i) now[i] += factors[i];
  now[0] = NAN;
  now[1] = 1e30f;
  for (const Kernels* kernels : available_kernels()) {
    std::vector<int32_t> sums(32, 5);
    kernels->words->add_change(now.data(), before.data(), 32, 4, sums.data());
    CHECK(sums[0] == (1 << 26) + 5 && sums[1] == (1 << 26) + 5);
    for (size_t i = 2; i < sums.size(); ++i) {
      CHECK(std::fabs(std::ldexp(sums[i] - 5, -24) - static_cast<double>(now[i] - before[i])) < 1e-7);
    }
    std::vector<float> applied(32);
    kernels->words->apply_change(applied.data(), 32, sums.data(), 0.5f);
    for (size_t i = 0; i < sums.size(); ++i) CHECK(applied[i] == static_cast<float>(sums[i]) * 0x1p-25f);
    float square = 0;
    for (const float each : applied) square += each * each;
    CHECK(std::fabs(kernels->words->square(applied.data(), 32) / square - 1) < 1e-5f);
    CHECK(kernels->words->square_of_change(sums.data(), 32) == 4 * kernels->words->square(applied.data(), 32));
  }
}

void test_means_in_all_instruction_sets() {
  std::vector<float> rows = random_floats(32 * 3);
  const std::vector<float> before = rows;
  float* pointers[] = {rows.data(), rows.data() + 32, rows.data() + 64, rows.data()};  // one of them twice
  std::vector<float> expected;
  for (const Kernels* kernels : available_kernels()) {
    rows = before;
    std::vector<float> mean(32), copy(32);
    kernels->words->average(pointers, 4, 32, mean.data(), copy.data());
    CHECK(are_equal(mean, copy));
    for (float& each : mean) each += 1;
    kernels->words->spread(pointers, 4, 32, mean.data(), copy.data());
    CHECK(std::fabs(rows[0] - before[0] - 2) < 1e-5f && std::fabs(rows[32] - before[32] - 1) < 1e-5f);
    if (expected.empty()) expected = rows;
    CHECK(are_equal(rows, expected));
  }
}

void test_words_are_counted() {
  WordTable table;
  table.add_text("a bb  a\n\n ccc\ta\r\nbb\x1c\x1d a\x1e\x1f", TextForm::kLines);
  table.add_text(
      "a\x1f"
      "b b\x1e"
      "b b\x1f\x1e",
      TextForm::kParts);
  const std::map<std::string, int64_t> expected{{"a", 5}, {"bb", 2}, {"ccc", 1}, {"b b", 2}};
  CHECK(table.size() == expected.size());
  for (const auto& [word, count] : expected) {
    const int32_t number = table.find(word);
    CHECK(number >= 0 && table.word(static_cast<size_t>(number)) == word);
    CHECK(table.count(static_cast<size_t>(number)) == count);
  }
  CHECK(table.find("aa") == WordTable::kUnknown && WordTable().find("a") == WordTable::kUnknown);
}

void test_a_large_table() {
  WordTable table;
  for (int i = 0; i < 20'000; ++i) table.add("word number " + std::to_string(i), i);
  for (int i = 0; i < 20'000; ++i) CHECK(table.find("word number " + std::to_string(i)) == i);
}

void test_sentences_are_encoded() {
  WordTable table;
  table.add("a", 1);
  table.add("b", 1);
  const EncodedShard shard = encode(table, "a x b\nx\n\nb b b\na", TextForm::kLines);
  CHECK((shard.words == std::vector<int32_t>{0, 1, 1, 1, 1, 0}));
  CHECK((shard.ends == std::vector<size_t>{2, 5, 6}));
  size_t next = 0;
  for (size_t part = 0; part < 4; ++part) {  // each sentence belongs to one part
    const auto [first, last] = part_of(shard, part, 4);
    CHECK(first == next && last >= first);
    next = last;
  }
  CHECK(next == shard.ends.size());
  std::string long_text;
  for (int i = 0; i < 25'000; ++i) long_text += "a ";
  CHECK((encode(table, long_text, TextForm::kLines).ends == std::vector<size_t>{10'000, 20'000, 25'000}));
}

// Two groups of words that never occur together, in two shards.
struct Corpus {
  static constexpr size_t kWords = 12, kWidth = 16;
  std::vector<int64_t> counts = std::vector<int64_t>(kWords);
  EncodedShard shards[2];
  WordOptions options{kWidth, 3, 5, false, true, 0, 0.75, 2, 7};

  Corpus() {
    for (int sentence = 0; sentence < 400; ++sentence) {
      EncodedShard& shard = shards[sentence % 2];
      const auto group = static_cast<int32_t>(generator() % 2 * (kWords / 2));
      for (int i = 0; i < 8; ++i) {
        shard.words.push_back(group + static_cast<int32_t>(generator() % (kWords / 2)));
        ++counts[static_cast<size_t>(shard.words.back())];
      }
      shard.ends.push_back(shard.words.size());
    }
  }

  // `is_shared`: two trainers have a shard each, and exchange what changed.
  std::vector<float> trained(bool is_shared) {
    std::vector<std::vector<float>> vectors(2, std::vector<float>(kWords * kWidth)), outputs = vectors;
    for (size_t i = 0; i < kWords * kWidth; ++i) vectors[0][i] = vectors[1][i] = static_cast<float>(i % 7) / 64 - 0.04f;
    std::vector<WordTrainer> trainers;
    for (size_t i = 0; i < 2; ++i) trainers.emplace_back(options, counts, vectors[i].data(), outputs[i].data());
    for (uint64_t epoch = 0; epoch < 20; ++epoch) {
      for (uint64_t number : {1, 0}) {
        const EncodedShard& shard = shards[number];
        trainers[is_shared ? number : 0].train(shard, number, 0, shard.ends.size(), epoch, 0.05f, 0.04f);
      }
      if (is_shared) {
        exchange(trainers[0].vectors(), trainers[1].vectors());
        exchange(trainers[0].outputs(), trainers[1].outputs());
      }
      const auto rows = changed(trainers[0].vectors()), nodes = changed(trainers[0].outputs());
      for (WordTrainer& trainer : trainers) trainer.apply(rows, nodes, 0.05f);
    }
    CHECK(!is_shared || are_equal(vectors[0], vectors[1]));
    return vectors[0];
  }

  static std::vector<int64_t> changed(const SharedRows& rows) {
    std::vector<int64_t> numbers;
    for (size_t i = 0; i < rows.changed().size(); ++i) {
      if (rows.changed()[i]) numbers.push_back(static_cast<int64_t>(i));
    }
    return numbers;
  }

  static void exchange(SharedRows& a, SharedRows& b) {
    const std::vector<int64_t> numbers = changed(a);
    CHECK(numbers == changed(b));  // each shard has all words
    std::vector<int32_t> sums(numbers.size() * a.sums_per_row()), others = sums;
    a.take(numbers, sums.data());
    b.take(numbers, others.data());
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += others[i];
    a.put(numbers, sums.data());
    b.put(numbers, sums.data());
  }

  static double similarity(const std::vector<float>& vectors, size_t word, size_t other) {
    double product = 0, square = 0, other_square = 0;
    for (size_t k = 0; k < kWidth; ++k) {
      const double x = vectors[word * kWidth + k], y = vectors[other * kWidth + k];
      product += x * y;
      square += x * x;
      other_square += y * y;
    }
    return product / std::sqrt(square * other_square);
  }
};

void test_words_of_a_group_become_similar_and_tasks_do_not_matter() {
  for (const size_t negative : {5, 0}) {
    for (const bool is_cbow : {false, true}) {
      Corpus corpus;
      corpus.options.negative = negative;
      corpus.options.is_cbow = is_cbow;
      const std::vector<float> vectors = corpus.trained(false);
      CHECK(are_equal(corpus.trained(true), vectors));
      CHECK(Corpus::similarity(vectors, 0, 1) > Corpus::similarity(vectors, 0, Corpus::kWords - 1) + 0.3);
    }
  }
}

// Many shards that move a row as far as they can: the sums do not wrap around, and the row does not move too far.
void test_sums_of_many_shards_fit() {
  constexpr size_t kWidth = 16;
  for (const size_t shards : {1, 32, 33, 1000}) {
    std::vector<float> rows(kWidth);
    SharedRows shared(rows.data(), 1, kWidth, shards);
    for (size_t shard = 0; shard < shards; ++shard) {
      std::fill_n(shared.row(0), kWidth, 100.0f);
      for (int i = 0; i < 3; ++i) shared.add_updates(0, INT32_MAX);
      shared.end_shard();
    }
    const std::vector<int64_t> numbers{0};
    std::vector<int32_t> sums(shared.sums_per_row());
    shared.take(numbers, sums.data());
    CHECK(sums[0] > 0 && sums[kWidth - 1] == sums[0] && sums[kWidth] > 0);
    const double all = sums[0] * 0x1p-24, count = static_cast<double>(shards);
    const double most = std::max(1.0, 128 / count) / std::sqrt(kWidth);  // of a number
    shared.apply(numbers, 0);
    CHECK(std::fabs(static_cast<double>(rows[0]) - std::min(all, std::max(most, all / count))) < 1e-5);
  }
}

void test_a_single_word_needs_no_tree() {
  std::vector<float> vectors(16, 0.5f), outputs(16);
  const std::vector<int64_t> counts{3};
  WordTrainer trainer({16, 2, 0, false, true, 0, 0.75, 1, 1}, counts, vectors.data(), outputs.data());
  CHECK(trainer.train({{0, 0, 0}, {3}}, 0, 0, 1, 0, 0.05f, 0.05f).count == 0);
}

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_slopes_are_those_of_the_logistic_loss();
  ronde::test_vectors_move_along_their_slopes();
  ronde::test_all_instruction_sets_give_the_same_bits();
  ronde::test_changes_in_all_instruction_sets();
  ronde::test_means_in_all_instruction_sets();
  ronde::test_words_are_counted();
  ronde::test_a_large_table();
  ronde::test_sentences_are_encoded();
  ronde::test_words_of_a_group_become_similar_and_tasks_do_not_matter();
  ronde::test_sums_of_many_shards_fit();
  ronde::test_a_single_word_needs_no_tree();
}
