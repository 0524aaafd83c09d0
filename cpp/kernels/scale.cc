#include "kernels/scale.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/reduce_kernels.h"

namespace ronde {
namespace {

const ScaleKernels& kernels() { return *available_kernels().front()->scale; }

// A finite factor, also as mantissa * 2^exponent.
struct Factor {
  explicit Factor(double value) : value(value) {
    constexpr int kMantissaBits = 53;
    mantissa = static_cast<int64_t>(std::ldexp(std::frexp(value, &exponent), kMantissaBits));
    exponent -= kMantissaBits;
  }
  double value;
  int64_t mantissa;
  int exponent;
};

// The product rounded towards zero, modulo 2^64.
template <class T>
uint64_t exact_product(T value, const Factor& factor) {
  __extension__ using Wide = __int128;
  __extension__ using Bits = unsigned __int128;
  const Wide product = static_cast<Wide>(value) * factor.mantissa;  // at most 118 bits
  if (factor.exponent >= 64) return 0;
  if (factor.exponent >= 0) return static_cast<uint64_t>(static_cast<Bits>(product) << factor.exponent);
  const int shift = -factor.exponent;
  if (shift >= 127) return 0;
  const Wide magnitude = (product < 0 ? -product : product) >> shift;
  return static_cast<uint64_t>(product < 0 ? -magnitude : magnitude);
}

// As NumPy multiplies by a float and converts back, as long as that is exact but for the rounding of the product.
template <class T>
T times(T value, const Factor& factor) {
  constexpr double kExact = 0x1p53;
  const double number = static_cast<double>(value), product = number * factor.value;
  if (std::fabs(number) < kExact && std::fabs(product) < kExact) return static_cast<T>(static_cast<int64_t>(product));
  return static_cast<T>(exact_product(value, factor));
}

template <class T>
void scale_integers(void* destination, const void* source, size_t count, double factor) {
  if (!std::isfinite(factor)) {
    std::memset(destination, 0, count * sizeof(T));
    return;
  }
  const Factor by(factor);
  const auto* from = static_cast<const std::byte*>(source);
  auto* to = static_cast<std::byte*>(destination);
  for (size_t i = 0; i < count; ++i, from += sizeof(T), to += sizeof(T)) {
    T value;
    std::memcpy(&value, from, sizeof value);
    value = times(value, by);
    std::memcpy(to, &value, sizeof value);
  }
}

}  // namespace

void scale(DType dtype, void* destination, const void* source, size_t count, double factor) {
  if (count == 0) return;
  if (dtype == DType::kBool || factor == 1.0) {
    if (destination != source) std::memcpy(destination, source, count * size_of(dtype));
    return;
  }
  switch (dtype) {
    case DType::kUint8:
      return scale_integers<uint8_t>(destination, source, count, factor);
    case DType::kUint16:
      return scale_integers<uint16_t>(destination, source, count, factor);
    case DType::kUint32:
      return scale_integers<uint32_t>(destination, source, count, factor);
    case DType::kUint64:
      return scale_integers<uint64_t>(destination, source, count, factor);
    case DType::kInt8:
      return scale_integers<int8_t>(destination, source, count, factor);
    case DType::kInt16:
      return scale_integers<int16_t>(destination, source, count, factor);
    case DType::kInt32:
      return scale_integers<int32_t>(destination, source, count, factor);
    case DType::kInt64:
      return scale_integers<int64_t>(destination, source, count, factor);
    default:
      return kernels().table[static_cast<int>(dtype)](destination, source, count, factor);
  }
}

void scale_to_float32(DType dtype, float* destination, const void* source, size_t count, double factor) {
  kernels().widening[static_cast<int>(dtype)](destination, source, count, factor);
}

void scale_from_float32(DType dtype, void* destination, const float* source, size_t count, double factor) {
  kernels().narrowing[static_cast<int>(dtype)](destination, source, count, factor);
}

}  // namespace ronde
