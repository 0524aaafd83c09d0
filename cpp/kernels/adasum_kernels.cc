// The arithmetic of Adasum: dot products, and weighted sums of two vectors. CMake compiles it once for every
// instruction set, by the rules of reduce_kernels.cc.
//
// Products are summed in float64, in sixteen partial sums: element i goes to sum i % 16 whatever the width of a vector,
// so all versions give the same bits here, too. Weighted sums are computed in the elements' type, 16-bit floats in
// float32, and rounded once.
#include <cstring>

#include "kernels/reduce_elements.h"
#include "kernels/reduce_kernels.h"

namespace ronde::RONDE_ISA {
namespace {

constexpr int kSums = 16;
constexpr int kSumVectors = kSums / kDoubles;

// --- Dot products ---------------------------------------------------------------------------------------------------

struct Products {
  Doubles aa[kSumVectors] = {};
  Doubles ab[kSumVectors] = {};
  Doubles bb[kSumVectors] = {};

  template <class Element>
  [[gnu::always_inline]] inline void add(const char* a, const char* b) {
#pragma GCC unroll 8
    for (int k = 0; k < kSumVectors; ++k) {
      const Doubles x = Element::load_doubles(a + k * kDoubles * Element::kBytes);
      const Doubles y = Element::load_doubles(b + k * kDoubles * Element::kBytes);
      aa[k] += x * x;
      ab[k] += x * y;
      bb[k] += y * y;
    }
  }
};

double total(const Doubles (&vectors)[kSumVectors]) {
  double sums[kSums];
  std::memcpy(sums, vectors, sizeof sums);
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

template <class Element>
void dot(const void* a, const void* b, size_t count, double* products) {
  constexpr size_t kStepBytes = kSums * Element::kBytes;
  const char* first = static_cast<const char*>(a);
  const char* second = static_cast<const char*>(b);
  const size_t end = count * Element::kBytes;
  Products sums;
  size_t offset = 0;
  for (; end - offset >= kStepBytes; offset += kStepBytes) sums.add<Element>(first + offset, second + offset);
  if (offset < end) {
    char padded_first[kStepBytes] = {}, padded_second[kStepBytes] = {};
    std::memcpy(padded_first, first + offset, end - offset);
    std::memcpy(padded_second, second + offset, end - offset);
    sums.add<Element>(padded_first, padded_second);
  }
  products[0] += total(sums.aa);
  products[1] += total(sums.ab);
  products[2] += total(sums.bb);
}

// --- Weighted sums --------------------------------------------------------------------------------------------------

template <class V, class Value>
V weighted(V a, Value weight_a, V b, Value weight_b) {
  return a * weight_a + b * weight_b;
}

FloatPair weighted(FloatPair a, float weight_a, FloatPair b, float weight_b) {
  return {weighted(a.first, weight_a, b.first, weight_b), weighted(a.second, weight_a, b.second, weight_b)};
}

template <class Element>
void weighted_sum(void* out, const void* a, double weight_a, const void* b, double weight_b, size_t count) {
  using Value = typename Element::Value;
  const auto first_weight = static_cast<Value>(weight_a), second_weight = static_cast<Value>(weight_b);
  const char* first = static_cast<const char*>(a);
  const char* second = static_cast<const char*>(b);
  char* to = static_cast<char*>(out);
  const size_t end = count * Element::kBytes;
  size_t offset = 0;
  for (; end - offset >= kVectorBytes; offset += kVectorBytes) {
    Element::store(to + offset, weighted(Element::load(first + offset), first_weight, Element::load(second + offset),
                                         second_weight));
  }
  if (offset == end) return;
  char padded_first[kVectorBytes] = {}, padded_second[kVectorBytes] = {};
  std::memcpy(padded_first, first + offset, end - offset);
  std::memcpy(padded_second, second + offset, end - offset);
  Element::store(padded_first,
                 weighted(Element::load(padded_first), first_weight, Element::load(padded_second), second_weight));
  std::memcpy(to + offset, padded_first, end - offset);
}

// --- The table ------------------------------------------------------------------------------------------------------

template <class Element>
constexpr void set(AdasumKernels& kernels, DType dtype) {
  kernels.dot[static_cast<int>(dtype)] = dot<Element>;
  kernels.weighted_sum[static_cast<int>(dtype)] = weighted_sum<Element>;
}

constexpr AdasumKernels make_kernels() {
  AdasumKernels kernels{};
  set<Float16>(kernels, DType::kFloat16);
  set<Bfloat16>(kernels, DType::kBfloat16);
  set<Plain<float>>(kernels, DType::kFloat32);
  set<Plain<double>>(kernels, DType::kFloat64);
  return kernels;
}

}  // namespace

extern constinit const AdasumKernels kAdasumKernels;
constinit const AdasumKernels kAdasumKernels = make_kernels();

}  // namespace ronde::RONDE_ISA
