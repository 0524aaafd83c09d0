#include "engine/scale.h"

#include <bit>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace ronde {
namespace {

// 16-bit floats with conversions from and to float32. They round to nearest, ties to even.

struct Bfloat16 {
  uint16_t bits;
  explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
  static Bfloat16 round(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    if ((word & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(word >> 16 | 0x40)};  // NaN stays one
    return {static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16)};
  }
};

struct Float16 {
  uint16_t bits;
  explicit operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t magnitude = bits & 0x7fff;
    if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    // The multiplication changes the exponent's bias from 15 to 127 and normalizes subnormal numbers.
    const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
  }
  static Float16 round(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    const auto sign = static_cast<uint16_t>(word >> 16 & 0x8000);
    const uint32_t magnitude = word & 0x7fffffff;
    if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
    if (magnitude >= 0x47800000) return {static_cast<uint16_t>(sign | 0x7c00)};  // 65536 and more
    if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000))};
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return {static_cast<uint16_t>(sign | (rounded - 0x38000000) >> 13)};
  }
};

// Runs body(T{}) with the C++ type of the elements.
template <class Body>
void with_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kBool:
      return;  // bool is neither scaled nor divided
    case DType::kUint8:
      return body(uint8_t{});
    case DType::kUint16:
      return body(uint16_t{});
    case DType::kUint32:
      return body(uint32_t{});
    case DType::kUint64:
      return body(uint64_t{});
    case DType::kInt8:
      return body(int8_t{});
    case DType::kInt16:
      return body(int16_t{});
    case DType::kInt32:
      return body(int32_t{});
    case DType::kInt64:
      return body(int64_t{});
    case DType::kFloat16:
      return body(Float16{});
    case DType::kBfloat16:
      return body(Bfloat16{});
    case DType::kFloat32:
      return body(float{});
    case DType::kFloat64:
      return body(double{});
    case DType::kComplex64:
      return body(std::complex<float>{});
    case DType::kComplex128:
      return body(std::complex<double>{});
  }
}

// Rounds towards zero and clamps to the type's limits.
template <class T>
T whole(double value) {
  using Limits = std::numeric_limits<T>;
  if (value != value) return 0;
  // The largest T may not be a double, but its successor 2^digits is: everything from there on is too large.
  if (value >= std::ldexp(1.0, Limits::digits)) return Limits::max();
  if (value <= static_cast<double>(Limits::lowest())) return Limits::lowest();
  return static_cast<T>(value);
}

template <class T>
constexpr bool kIsSmall = std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>;

template <class T>
T times(T value, double factor) {
  if constexpr (std::is_integral_v<T>) {
    return whole<T>(static_cast<double>(value) * factor);
  } else if constexpr (kIsSmall<T>) {
    return T::round(static_cast<float>(value) * static_cast<float>(factor));
  } else if constexpr (std::is_floating_point_v<T>) {
    return value * static_cast<T>(factor);
  } else {
    return value * static_cast<typename T::value_type>(factor);
  }
}

template <class T>
T load(const void* from, size_t index) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(from) + index * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void store(void* to, size_t index, T value) {
  std::memcpy(static_cast<std::byte*>(to) + index * sizeof(T), &value, sizeof(T));
}

}  // namespace

void scale(DType dtype, void* destination, const void* source, size_t count, double factor) {
  if (dtype == DType::kBool || factor == 1.0) {
    if (destination != source && count > 0) std::memcpy(destination, source, count * size_of(dtype));
    return;
  }
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    for (size_t i = 0; i < count; ++i) store<T>(destination, i, times(load<T>(source, i), factor));
  });
}

void scale_to_float32(DType dtype, float* destination, const void* source, size_t count, double factor) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (kIsSmall<T>) {
      const auto by = static_cast<float>(factor);
      for (size_t i = 0; i < count; ++i) destination[i] = static_cast<float>(load<T>(source, i)) * by;
    }
  });
}

void scale_from_float32(DType dtype, void* destination, const float* source, size_t count, double factor) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (kIsSmall<T>) {
      const auto by = static_cast<float>(factor);
      for (size_t i = 0; i < count; ++i) store<T>(destination, i, T::round(source[i] * by));
    }
  });
}

}  // namespace ronde
