// The reference for reduce_test.cc: reduces one number at a time, in the types of the language.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/types.h"

namespace ronde {

using Bytes = std::vector<char>;

// A 16-bit float with kMantissaBits bits of mantissa, converted by arithmetic on exact doubles.
template <int kMantissaBits>
struct Small {
  static constexpr int kBias = (1 << (14 - kMantissaBits)) - 1;
  static constexpr int kInfinity = 0x7fff >> kMantissaBits << kMantissaBits;
  uint16_t bits;

  Small() = default;
  explicit Small(float value) {
    if (std::isnan(value)) {
      bits = kInfinity | 1 << (kMantissaBits - 1);
      return;
    }
    const double magnitude = std::fabs(static_cast<double>(value));
    const double largest = std::ldexp((2 << kMantissaBits) - 1, kBias - kMantissaBits);
    int encoded = kInfinity;
    if (magnitude < largest + std::ldexp(1, kBias - kMantissaBits - 1)) {
      const int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), 1 - kBias) : 1 - kBias;
      // nearbyint() rounds to nearest even; a carry into the exponent gives the correct number.
      encoded = static_cast<int>(std::nearbyint(std::ldexp(magnitude, kMantissaBits - exponent))) +
                ((exponent + kBias - 1) << kMantissaBits);
    }
    bits = static_cast<uint16_t>(encoded | (std::signbit(value) ? 0x8000 : 0));
  }
  operator float() const {
    const int exponent = (bits & 0x7fff) >> kMantissaBits;
    const int mantissa = bits & ((1 << kMantissaBits) - 1);
    double magnitude = std::ldexp(mantissa, 1 - kBias - kMantissaBits);
    if (exponent > 0) magnitude = std::ldexp(mantissa + (1 << kMantissaBits), exponent - kBias - kMantissaBits);
    if (exponent == 2 * kBias + 1) magnitude = mantissa == 0 ? HUGE_VAL : std::nan("");
    return static_cast<float>(bits & 0x8000 ? -magnitude : magnitude);
  }
};
using Half = Small<10>;
using Brain = Small<7>;

struct Truth {
  uint8_t byte;
  Truth() = default;
  explicit Truth(bool value) : byte(value) {}
  operator bool() const { return byte != 0; }
};

template <class T>
constexpr bool kIsComplex = std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>;
template <class T>
constexpr bool kIsInteger = std::is_integral_v<T> && !std::is_same_v<T, bool>;

// The accumulator's type for elements of type T.
template <class T>
struct AccumulatorOf {
  using Type = T;
};
template <int kMantissaBits>
struct AccumulatorOf<Small<kMantissaBits>> {
  using Type = float;
};
template <>
struct AccumulatorOf<Truth> {
  using Type = bool;
};

// Wraps around: 64-bit unsigned numbers hold the low bits of every integer type's sum and product.
template <class T>
T add(T a, T b) {
  if constexpr (kIsInteger<T>) return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  if constexpr (!kIsInteger<T>) return static_cast<T>(a + b);
}

template <class T>
T multiply(T a, T b) {
  if constexpr (kIsInteger<T>) return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  if constexpr (kIsComplex<T>) {
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
  }
  if constexpr (!kIsInteger<T> && !kIsComplex<T>) return static_cast<T>(a * b);
}

template <class T>
T least(T a, T b, bool greatest) {
  if constexpr (!kIsComplex<T>) {
    if (a != a || b != b) return a != a ? a : b;
    if constexpr (std::is_floating_point_v<T>) {
      if (a == b) {  // perhaps zeros of different sign
        const bool is_negative = greatest ? std::signbit(a) && std::signbit(b) : std::signbit(a) || std::signbit(b);
        return std::copysign(a, is_negative ? T{-1} : T{1});
      }
    }
    return (greatest ? a > b : a < b) ? a : b;
  }
  return a;
}

template <class T>
T combine_bits(ReduceOp op, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::kBitAnd) return static_cast<T>(a & b);
    if (op == ReduceOp::kBitOr) return static_cast<T>(a | b);
    return static_cast<T>(a ^ b);
  }
  return a;
}

template <class T>
T combine(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return add(a, b);
    case ReduceOp::kMin:
      return least(a, b, false);
    case ReduceOp::kMax:
      return least(a, b, true);
    case ReduceOp::kProduct:
      return multiply(a, b);
    default:
      return combine_bits(op, a, b);
  }
}

template <class T>
T divided(T a, int divisor) {
  if constexpr (kIsComplex<T>) {
    using Part = typename T::value_type;
    return {a.real() / static_cast<Part>(divisor), a.imag() / static_cast<Part>(divisor)};
  }
  if constexpr (!kIsComplex<T>) return a / static_cast<T>(divisor);
}

template <class T>
Bytes expected_of(ReduceOp op, const std::vector<Bytes>& sources, int divisor) {
  using Accumulator = typename AccumulatorOf<T>::Type;
  Bytes result(sources[0].size());
  for (size_t offset = 0; offset < result.size(); offset += sizeof(T)) {
    T element;
    std::memcpy(&element, &sources[0][offset], sizeof element);
    Accumulator sum = static_cast<Accumulator>(element);
    for (size_t source = 1; source < sources.size(); ++source) {
      std::memcpy(&element, &sources[source][offset], sizeof element);
      sum = combine<Accumulator>(op, sum, static_cast<Accumulator>(element));
    }
    if (op == ReduceOp::kAverage) sum = divided(sum, divisor);
    element = static_cast<T>(sum);
    std::memcpy(&result[offset], &element, sizeof element);
  }
  return result;
}

// Sums without wrapping around, then rounds towards zero.
template <class T>
Bytes average_of_integers(const std::vector<Bytes>& sources, int divisor) {
  Bytes result(sources[0].size());
  for (size_t offset = 0; offset < result.size(); offset += sizeof(T)) {
    __extension__ __int128 sum = 0;
    T element;
    for (const Bytes& source : sources) {
      std::memcpy(&element, &source[offset], sizeof element);
      sum += element;
    }
    element = static_cast<T>(sum / divisor);
    std::memcpy(&result[offset], &element, sizeof element);
  }
  return result;
}

// Calls function(T()) with the reference's type for dtype.
template <class Function>
auto with_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::kBool:
      return function(Truth());
    case DType::kUint8:
      return function(uint8_t());
    case DType::kUint16:
      return function(uint16_t());
    case DType::kUint32:
      return function(uint32_t());
    case DType::kUint64:
      return function(uint64_t());
    case DType::kInt8:
      return function(int8_t());
    case DType::kInt16:
      return function(int16_t());
    case DType::kInt32:
      return function(int32_t());
    case DType::kInt64:
      return function(int64_t());
    case DType::kFloat16:
      return function(Half());
    case DType::kBfloat16:
      return function(Brain());
    case DType::kFloat32:
      return function(float());
    case DType::kFloat64:
      return function(double());
    case DType::kComplex64:
      return function(std::complex<float>());
    case DType::kComplex128:
      return function(std::complex<double>());
  }
  std::abort();
}

inline Bytes expected_of(DType dtype, ReduceOp op, const std::vector<Bytes>& sources, int divisor) {
  return with_type(dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (kIsInteger<T>) {
      if (op == ReduceOp::kAverage) return average_of_integers<T>(sources, divisor);
    }
    return expected_of<T>(op, sources, divisor);
  });
}

template <class T>
bool same_numbers(const char* a, const char* b, size_t bytes) {
  for (size_t offset = 0; offset < bytes; offset += sizeof(T)) {
    T x, y;
    std::memcpy(&x, a + offset, sizeof x);
    std::memcpy(&y, b + offset, sizeof y);
    if (std::memcmp(&x, &y, sizeof x) != 0 &&
        !(std::isnan(static_cast<double>(x)) && std::isnan(static_cast<double>(y))))
      return false;
  }
  return true;
}

// Compares bits, except that any NaN equals any other: the compiler may choose which of two NaN an addition returns.
inline bool same(DType dtype, const char* a, const char* b, size_t bytes) {
  return with_type(dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (kIsComplex<T>) return same_numbers<typename T::value_type>(a, b, bytes);
    if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Brain> || std::is_floating_point_v<T>)
      return same_numbers<T>(a, b, bytes);
    return bytes == 0 || std::memcmp(a, b, bytes) == 0;
  });
}

}  // namespace ronde
