// Private to reduce.cc, nearest_centers.cc, kernels/scale.cc, word_batch.cc, topic_*.cc, the *_kernels.cc and their
// tests: the kernels of one instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.h"
#include "kernels/nearest_centers.h"
#include "kernels/word_batch.h"

namespace ronde {

// reduce_to_all() for one dtype and one operation.
using Kernel = void (*)(void* const* destinations, int destination_count, const void* const* sources, int source_count,
                        size_t count, int divisor);

// add_dot_products() and weighted_sum() for one dtype; see adasum_kernels.cc.
using DotKernel = void (*)(const void* a, const void* b, size_t count, double* products);
using WeightedSumKernel = void (*)(void* out, const void* a, double weight_a, const void* b, double weight_b,
                                   size_t count);

struct AdasumKernels {
  DotKernel dot[kDTypeCount];  // nullptr: undefined for the dtype
  WeightedSumKernel weighted_sum[kDTypeCount];
};

// A multiplication by a factor; see scale_kernels.cc.
using ScaleKernel = void (*)(void* destination, const void* source, size_t count, double factor);

struct ScaleKernels {
  ScaleKernel table[kDTypeCount];  // nullptr: not floats
  // Of 16-bit floats, by their type: to float32, and from float32.
  ScaleKernel widening[kDTypeCount];
  ScaleKernel narrowing[kDTypeCount];
};

// assign_to_centers() for one dtype; see center_kernels.cc. `scratch`: tile_bytes for each center.
using CenterKernel = double (*)(const CenterAssignment& assignment, void* scratch);

struct CenterKernels {
  CenterKernel float32;
  CenterKernel float64;
  size_t tile_bytes;
};

// Sums of topics; see topic_kernels.cc. Arrays are rows of kTopicLanes numbers, filled up with zeros.
constexpr size_t kTopicLanes = 16;

// A number is drawn with probabilities in proportion to weight x share. Rounding may make it one that has none.
struct TopicDrawing {
  const float* weights;
  const float* shares;
  float uniform;   // in [0, 1)
  float mass;      // result: the sum of weight x share
  uint32_t topic;  // result
};

struct TopicKernels {
  // Draws `count` numbers. `cumulated`: for as many numbers as all of them have weights.
  void (*draw)(TopicDrawing* drawings, size_t count, size_t rows, float* cumulated);
  double (*dot)(const double* a, const double* b, size_t rows);
  void (*add_scaled)(double* sums, const double* a, double factor, size_t rows);  // sums += a x factor
};

struct Kernels {
  const char* instruction_set;
  const AdasumKernels* adasum;
  const CenterKernels* centers;
  const ScaleKernels* scale;
  const WordKernels* words;
  const TopicKernels* topics;
  Kernel table[kDTypeCount][kReduceOpCount];  // nullptr: the operation is undefined for the dtype
  // For 16-bit floats, by their type: to a result of float32, and from sources of float32.
  Kernel widening[kDTypeCount][kReduceOpCount];
  Kernel narrowing[kDTypeCount][kReduceOpCount];
};

// The kernels that this machine can run, the fastest first. Never empty; all give the same results.
std::span<const Kernels* const> available_kernels();

}  // namespace ronde
