#include "engine/neutral.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "kernels/reduction.h"

namespace ronde {
namespace {

// One element, as bytes.
struct Element {
  std::array<unsigned char, 16> bytes{};
};

template <class T>
Element element(T value) {
  Element element;
  std::memcpy(element.bytes.data(), &value, sizeof(T));
  return element;
}

template <class T>
Element bound(bool is_largest) {
  using Limits = std::numeric_limits<T>;
  if constexpr (Limits::has_infinity) {
    return element<T>(is_largest ? Limits::infinity() : -Limits::infinity());
  } else {
    return element<T>(is_largest ? Limits::max() : Limits::lowest());
  }
}

Element bound(DType dtype, bool is_largest) {
  switch (dtype) {
    case DType::kBool:
      return element<uint8_t>(is_largest ? 1 : 0);
    case DType::kUint8:
      return bound<uint8_t>(is_largest);
    case DType::kUint16:
      return bound<uint16_t>(is_largest);
    case DType::kUint32:
      return bound<uint32_t>(is_largest);
    case DType::kUint64:
      return bound<uint64_t>(is_largest);
    case DType::kInt8:
      return bound<int8_t>(is_largest);
    case DType::kInt16:
      return bound<int16_t>(is_largest);
    case DType::kInt32:
      return bound<int32_t>(is_largest);
    case DType::kInt64:
      return bound<int64_t>(is_largest);
    case DType::kFloat16:
      return element<uint16_t>(is_largest ? 0x7c00 : 0xfc00);  // infinities
    case DType::kBfloat16:
      return element<uint16_t>(is_largest ? 0x7f80 : 0xff80);
    case DType::kFloat32:
      return bound<float>(is_largest);
    case DType::kFloat64:
      return bound<double>(is_largest);
    case DType::kComplex64:
    case DType::kComplex128:
      break;
  }
  throw UsageError(std::string(name_of(dtype)) + " values have no order");
}

Element one(DType dtype, bool by_ronde) {
  switch (dtype) {
    case DType::kFloat16:
      return element<uint16_t>(0x3c00);
    case DType::kBfloat16:
      return element<uint16_t>(0x3f80);
    case DType::kFloat32:
      return element<float>(1);
    case DType::kFloat64:
      return element<double>(1);
    case DType::kComplex64:  // the real part comes first
      return by_ronde ? element(std::array{kAbsentFactor<4>, kAbsentFactor<4>}) : element<float>(1);
    case DType::kComplex128:
      return by_ronde ? element(std::array{kAbsentFactor<8>, kAbsentFactor<8>}) : element<double>(1);
    default:
      return element<uint64_t>(1);  // integers begin with their lowest byte
  }
}

// The sum of -0 and 0 is 0, so 0 would change -0.
Element zero(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBfloat16:
      return element<uint16_t>(0x8000);
    case DType::kFloat32:
      return element<float>(-0.0F);
    case DType::kFloat64:
      return element<double>(-0.0);
    case DType::kComplex64:
      return element(std::array{-0.0F, -0.0F});
    case DType::kComplex128:
      return element(std::array{-0.0, -0.0});
    default:
      return {};
  }
}

Element neutral(DType dtype, ReduceOp op, bool by_ronde) {
  switch (op) {
    case ReduceOp::kMin:
      return bound(dtype, true);
    case ReduceOp::kMax:
      return bound(dtype, false);
    case ReduceOp::kProduct:
      return one(dtype, by_ronde);
    case ReduceOp::kBitAnd:
      return dtype == DType::kBool ? one(dtype, by_ronde) : element<uint64_t>(UINT64_MAX);
    default:
      return zero(dtype);
  }
}

}  // namespace

void fill_neutral(DType dtype, ReduceOp op, void* values, size_t count, bool by_ronde) {
  constexpr size_t kBlockBytes = 4096;
  const Element each = neutral(dtype, op, by_ronde);
  const size_t bytes = count * size_of(dtype);
  auto* const begin = static_cast<std::byte*>(values);
  size_t done = std::min(bytes, size_of(dtype));
  if (done > 0) std::memcpy(begin, each.bytes.data(), done);
  while (done < bytes) {  // doubles what is there, up to a block that fits into the nearest cache
    const size_t more = std::min({done, bytes - done, kBlockBytes});
    std::memcpy(begin + done, begin, more);
    done += more;
  }
}

}  // namespace ronde
