// The inner loop of Word2Vec: one step of gradient ascent on a logistic model of some input and some output vectors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ronde {

// A vector has a whole number of groups of so many floats; unused ones are 0.
constexpr size_t kWordLanes = 16;

// Each input vector predicts the labels of all output vectors, so that an update is a product of matrices.
struct WordBatch {
  float* const* inputs;   // vectors; they may be equal
  size_t input_count;     // at least 1
  float* const* outputs;  // vectors, no two of them equal, none of them an input
  const float* labels;    // of the outputs: 1 or 0
  size_t output_count;    // at least 1
  size_t width;           // of a vector: a multiple of kWordLanes
  float rate;             // the step
  float* slopes;          // scratch: word_slopes(input_count, output_count); afterwards rate * (label - prediction)
};

// How many floats the slopes of a batch take.
constexpr size_t word_slopes(size_t input_count, size_t output_count) {
  return (input_count * output_count + kWordLanes - 1) / kWordLanes * kWordLanes;
}

// The kernels of one instruction set; see word_kernels.cc. All give the same bits.
struct WordKernels {
  // Moves the vectors of the batch.
  void (*train)(const WordBatch& batch);
  // mean = the mean of some vectors; copy = the same.
  void (*average)(float* const* vectors, size_t count, size_t width, float* mean, float* copy);
  // Adds moved - mean to each of some vectors.
  void (*spread)(float* const* vectors, size_t count, size_t width, const float* moved, const float* mean);
  // Adds now - before to the sums, in units of 2^-24. A change of more than `most`, at most 4, counts as `most`.
  void (*add_change)(const float* now, const float* before, size_t width, float most, int32_t* sums);
  // Adds the sums, in these units, times a factor to a vector.
  void (*apply_change)(float* vector, size_t width, const int32_t* sums, float factor);
  // The squared length of a vector, and of a sum of changes.
  float (*square)(const float* vector, size_t width);
  float (*square_of_change)(const int32_t* sums, size_t width);
};

const WordKernels& best_word_kernels();

}  // namespace ronde
