// The kernels of word_batch.h. CMake compiles them once for every instruction set, by the rules of reduce_kernels.cc.
//
// A dot product has kWordLanes partial sums, which are added along one tree, so its bits do not depend on the width of
// a vector register. All else is computed element by element.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/reduce_elements.h"
#include "kernels/word_batch.h"

namespace ronde::RONDE_ISA {

extern const WordKernels kWordKernels;

namespace {

constexpr size_t kItems = kVectorBytes / sizeof(float);
constexpr size_t kParts = kWordLanes / kItems;
constexpr size_t kInputsAtOnce = 2, kOutputsAtOnce = 3;  // their dot products fit into the registers
constexpr size_t kOutputsOfUpdate = 6;

[[gnu::always_inline]] inline Floats load(const float* from) {
  Floats vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

[[gnu::always_inline]] inline void store(float* to, Floats vector) { std::memcpy(to, &vector, sizeof vector); }

// The sum of all partial sums: halves are added until one is left.
[[gnu::always_inline]] inline float sum_of(const Floats (&parts)[kParts]) {
  typedef float Quarter __attribute__((vector_size(16)));
  Quarter quarters[4];
  static_assert(sizeof quarters == sizeof parts);
  std::memcpy(quarters, parts, sizeof quarters);
  const Quarter sum = (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

template <size_t kInputs, size_t kOutputs>
[[gnu::always_inline]] inline void multiply_tile(float* const* inputs, float* const* outputs, size_t width,
                                                 size_t stride, float* products) {
  Floats sums[kInputs][kOutputs][kParts] = {};
  for (size_t first = 0; first < width; first += kWordLanes) {
#pragma GCC unroll 4
    for (size_t part = 0; part < kParts; ++part) {
      const size_t at = first + part * kItems;
      Floats columns[kOutputs];
#pragma GCC unroll 4
      for (size_t j = 0; j < kOutputs; ++j) columns[j] = load(outputs[j] + at);
#pragma GCC unroll 4
      for (size_t i = 0; i < kInputs; ++i) {
        const Floats row = load(inputs[i] + at);
#pragma GCC unroll 4
        for (size_t j = 0; j < kOutputs; ++j) sums[i][j][part] += row * columns[j];
      }
    }
  }
  for (size_t i = 0; i < kInputs; ++i) {
    for (size_t j = 0; j < kOutputs; ++j) products[i * stride + j] = sum_of(sums[i][j]);
  }
}

template <size_t kInputs>
[[gnu::always_inline]] inline void multiply_rows(const WordBatch& batch, size_t i) {
  float* const* inputs = batch.inputs + i;
  float* products = batch.slopes + i * batch.output_count;
  size_t j = 0;
  for (; j + kOutputsAtOnce <= batch.output_count; j += kOutputsAtOnce) {
    multiply_tile<kInputs, kOutputsAtOnce>(inputs, batch.outputs + j, batch.width, batch.output_count, products + j);
  }
  for (; j < batch.output_count; ++j) {
    multiply_tile<kInputs, 1>(inputs, batch.outputs + j, batch.width, batch.output_count, products + j);
  }
}

void multiply(const WordBatch& batch) {
  size_t i = 0;
  for (; i + kInputsAtOnce <= batch.input_count; i += kInputsAtOnce) multiply_rows<kInputsAtOnce>(batch, i);
  for (; i < batch.input_count; ++i) multiply_rows<1>(batch, i);
}

// 2^x for x between -126 and 126, to about 1e-7 of its value: by the nearest whole number, and a polynomial.
[[gnu::always_inline]] inline Floats power_of_two(Floats x) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves no digits behind the point
  const Floats shifted = x + kRound, whole = shifted - kRound, rest = x - whole;
  Integers exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  Floats value = rest * 1.53536e-4f + 1.33988e-3f;
  value = value * rest + 9.618437e-3f;
  value = value * rest + 5.5503324e-2f;
  value = value * rest + 2.4022648e-1f;
  value = value * rest + 6.931472e-1f;
  value = value * rest + 1.0f;
  Integers bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits += exponent << 23;  // the bits of kRound above the exponent's vanish
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

[[gnu::always_inline]] inline Floats logistic(Floats x) {
  constexpr float kLogOfE = 1.44269504f, kMost = 30;
  const Floats most = Floats{} + kMost;
  x = x < most ? x : most;  // a NaN becomes the bound
  x = x > -most ? x : -most;
  return 1.0f / (1.0f + power_of_two(x * -kLogOfE));
}

// Makes slopes of dot products.
void compare_with_labels(const WordBatch& batch) {
  const size_t count = batch.input_count * batch.output_count;
  for (size_t at = count; at < word_slopes(batch.input_count, batch.output_count); ++at) batch.slopes[at] = 0;
  for (size_t at = 0; at < count; at += kItems) store(batch.slopes + at, logistic(load(batch.slopes + at)));
  float* slope = batch.slopes;
  for (size_t i = 0; i < batch.input_count; ++i) {
    for (size_t j = 0; j < batch.output_count; ++j, ++slope) *slope = (batch.labels[j] - *slope) * batch.rate;
  }
}

template <size_t kOutputs>
[[gnu::always_inline]] inline void move_some(const WordBatch& batch, size_t first) {
  float* const* outputs = batch.outputs + first;
  for (size_t at = 0; at < batch.width; at += kItems) {
    Floats columns[kOutputs], moves[kOutputs] = {};
#pragma GCC unroll 6
    for (size_t j = 0; j < kOutputs; ++j) columns[j] = load(outputs[j] + at);
    const float* slopes = batch.slopes + first;
    for (size_t i = 0; i < batch.input_count; ++i, slopes += batch.output_count) {
      const Floats row = load(batch.inputs[i] + at);
      Floats moved = row;
#pragma GCC unroll 6
      for (size_t j = 0; j < kOutputs; ++j) {
        moved += slopes[j] * columns[j];
        moves[j] += slopes[j] * row;
      }
      store(batch.inputs[i] + at, moved);
    }
#pragma GCC unroll 6
    for (size_t j = 0; j < kOutputs; ++j) store(outputs[j] + at, columns[j] + moves[j]);
  }
}

void train(const WordBatch& batch) {
  multiply(batch);
  compare_with_labels(batch);
  size_t first = 0;
  for (; first + kOutputsOfUpdate <= batch.output_count; first += kOutputsOfUpdate) {
    move_some<kOutputsOfUpdate>(batch, first);
  }
  switch (batch.output_count - first) {
    case 5:
      return move_some<5>(batch, first);
    case 4:
      return move_some<4>(batch, first);
    case 3:
      return move_some<3>(batch, first);
    case 2:
      return move_some<2>(batch, first);
    case 1:
      return move_some<1>(batch, first);
  }
}

void average(float* const* vectors, size_t count, size_t width, float* mean, float* copy) {
  const float share = 1.0f / static_cast<float>(count);
  for (size_t at = 0; at < width; at += kItems) {
    Floats sum = load(vectors[0] + at);
    for (size_t i = 1; i < count; ++i) sum += load(vectors[i] + at);
    sum *= share;
    store(mean + at, sum);
    store(copy + at, sum);
  }
}

void spread(float* const* vectors, size_t count, size_t width, const float* moved, const float* mean) {
  for (size_t at = 0; at < width; at += kItems) {
    const Floats move = load(moved + at) - load(mean + at);
    for (size_t i = 0; i < count; ++i) store(vectors[i] + at, load(vectors[i] + at) + move);
  }
}

constexpr float kUnit = 0x1p-24f;

void add_change(const float* now, const float* before, size_t width, float most_change, int32_t* sums) {
  const Floats most = Floats{} + most_change, half = Floats{} + 0.5f;
  for (size_t at = 0; at < width; at += kItems) {
    Floats change = load(now + at) - load(before + at);
    change = change < most ? change : most;  // a NaN becomes the bound
    change = change > -most ? change : -most;
    change = change * (1 / kUnit);
    change += change < 0 ? -half : half;
    Words sum;  // unsigned, so that it may wrap around
    std::memcpy(&sum, sums + at, sizeof sum);
    sum += (Words) __builtin_convertvector(change, Integers);
    std::memcpy(sums + at, &sum, sizeof sum);
  }
}

[[gnu::always_inline]] inline Floats load_change(const int32_t* sums) {
  Integers sum;
  std::memcpy(&sum, sums, sizeof sum);
  return __builtin_convertvector(sum, Floats);
}

void apply_change(float* vector, size_t width, const int32_t* sums, float factor) {
  for (size_t at = 0; at < width; at += kItems)
    store(vector + at, load(vector + at) + load_change(sums + at) * (kUnit * factor));
}

// `load`: returns the numbers from a place on.
template <class Load>
[[gnu::always_inline]] inline float square_of(size_t width, Load load) {
  Floats sums[kParts] = {};
  for (size_t first = 0; first < width; first += kWordLanes) {
#pragma GCC unroll 4
    for (size_t part = 0; part < kParts; ++part) {
      const Floats numbers = load(first + part * kItems);
      sums[part] += numbers * numbers;
    }
  }
  return sum_of(sums);
}

float square(const float* vector, size_t width) {
  return square_of(width, [=](size_t at) { return load(vector + at); });
}

float square_of_change(const int32_t* sums, size_t width) {
  return square_of(width, [=](size_t at) { return load_change(sums + at) * kUnit; });
}

}  // namespace

extern constinit const WordKernels kWordKernels;
constinit const WordKernels kWordKernels = {
    train, average, spread, add_change, apply_change, square, square_of_change,
};

}  // namespace ronde::RONDE_ISA
