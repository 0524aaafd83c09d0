// Multiplication of floats by a factor, in terms of the vectors of reduce_elements.h. CMake compiles this file once for
// every instruction set, under the same rules as reduce_kernels.cc.
#include <cstddef>
#include <cstring>

#include "kernels/reduce_elements.h"
#include "kernels/reduce_kernels.h"

namespace ronde::RONDE_ISA {
namespace {

template <class V, class Value>
V times(V a, Value factor) {
  return a * factor;
}

FloatPair times(FloatPair a, float factor) { return {a.first * factor, a.second * factor}; }

// From elements of one type to elements of the same or another type with the same layout in accumulators. The
// destination may be the source if the types are the same.
template <class Source, class Destination>
void scale(void* destination, const void* source, size_t count, double factor) {
  static_assert(Source::kItems == Destination::kItems);
  constexpr size_t kFromBytes = Source::kItems * Source::kBytes, kToBytes = Source::kItems * Destination::kBytes;
  const auto by = static_cast<typename Source::Value>(factor);
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(destination);
  for (; count >= Source::kItems; count -= Source::kItems, from += kFromBytes, to += kToBytes) {
    Destination::store(to, times(Source::load(from), by));
  }
  if (count == 0) return;
  char loaded[kFromBytes] = {}, stored[kToBytes];
  std::memcpy(loaded, from, count * Source::kBytes);
  Destination::store(stored, times(Source::load(loaded), by));
  std::memcpy(to, stored, count * Destination::kBytes);
}

template <class Part>
void scale_complex(void* destination, const void* source, size_t count, double factor) {
  scale<Plain<Part>, Plain<Part>>(destination, source, 2 * count, factor);
}

// --- The table ------------------------------------------------------------------------------------------------------

template <class Small>
constexpr void set_small(ScaleKernels& kernels, DType dtype) {
  const int row = static_cast<int>(dtype);
  kernels.table[row] = scale<Small, Small>;
  kernels.widening[row] = scale<Small, PartialOf<Small>>;
  kernels.narrowing[row] = scale<PartialOf<Small>, Small>;
}

constexpr ScaleKernels make_kernels() {
  ScaleKernels kernels{};
  set_small<Float16>(kernels, DType::kFloat16);
  set_small<Bfloat16>(kernels, DType::kBfloat16);
  kernels.table[static_cast<int>(DType::kFloat32)] = scale<Plain<float>, Plain<float>>;
  kernels.table[static_cast<int>(DType::kFloat64)] = scale<Plain<double>, Plain<double>>;
  kernels.table[static_cast<int>(DType::kComplex64)] = scale_complex<float>;
  kernels.table[static_cast<int>(DType::kComplex128)] = scale_complex<double>;
  return kernels;
}

}  // namespace

extern constinit const ScaleKernels kScaleKernels;
constinit const ScaleKernels kScaleKernels = make_kernels();

}  // namespace ronde::RONDE_ISA
