// Multiplication by a factor: floats with every instruction set of this machine, and integers.
#include "kernels/scale.h"

#include <cmath>
#include <complex>
#include <cstdint>
#include <vector>

#include "check.h"
#include "kernels/reduce_kernels.h"

namespace ronde {
namespace {

template <class T>
std::vector<T> scaled(DType dtype, std::vector<T> values, double factor) {
  scale(dtype, values.data(), values.data(), values.size(), factor);
  return values;
}

void test_floats() {
  std::vector<float> floats = {1, -2, 0.5f};
  scale(DType::kFloat32, floats.data(), floats.data(), 3, 0.5);
  CHECK(floats == std::vector<float>({0.5f, -1, 0.25f}));
  using Complexes = std::vector<std::complex<float>>;
  CHECK(scaled(DType::kComplex64, Complexes{{1, -2}, {0, 5}}, 0.5) == Complexes({{0.5f, -1}, {0, 2.5f}}));
}

// They are rounded towards zero, and wrap around as sums do.
void test_integers() {
  using Words = std::vector<int64_t>;
  const int64_t large = (int64_t{1} << 60) + 1, odd = 9223372036854775803;
  CHECK(scaled(DType::kInt32, std::vector<int32_t>{7, -7, 4}, 0.5) == std::vector<int32_t>({3, -3, 2}));
  CHECK(scaled(DType::kInt32, std::vector<int32_t>{3, 10, -10}, 1.0 / 3) == std::vector<int32_t>({1, 3, -3}));
  CHECK(scaled(DType::kInt32, std::vector<int32_t>{1 << 30, -1}, 4) == std::vector<int32_t>({0, -4}));
  CHECK(scaled(DType::kInt32, std::vector<int32_t>{3, -3}, 0x1p40 + 1) == std::vector<int32_t>({3, -3}));
  CHECK(scaled(DType::kUint8, std::vector<uint8_t>{100, 200, 7}, 2) == std::vector<uint8_t>({200, 144, 14}));
  CHECK(scaled(DType::kUint8, std::vector<uint8_t>{1, 0, 255}, -1) == std::vector<uint8_t>({255, 0, 1}));
  CHECK(scaled(DType::kInt64, Words{large, -large, 3}, 2) == Words({2 * large, -2 * large, 6}));
  CHECK(scaled(DType::kInt64, Words{INT64_MAX, INT64_MIN}, 2) == Words({-2, 0}));
  CHECK(scaled(DType::kInt64, Words{INT64_MAX, INT64_MIN, large}, 0.5) ==
        Words({INT64_MAX / 2, INT64_MIN / 2, large / 2}));
  CHECK(scaled(DType::kInt64, Words{odd, -odd}, 0.625) == Words({5764607523034234876, -5764607523034234876}));
  CHECK(scaled(DType::kInt64, Words{INT64_MAX, -5, 0}, 0x1p-70) == Words({0, 0, 0}));
  CHECK(scaled(DType::kInt64, Words{INT64_MAX, INT64_MIN, 5}, 1e300) == Words({0, 0, 0}));
  CHECK(scaled(DType::kInt64, Words{5, -5}, 5e-324) == Words({0, 0}));
  CHECK(scaled(DType::kInt64, Words{5}, std::nan("")) == Words({0}));
  CHECK(scaled(DType::kUint64, std::vector<uint64_t>{UINT64_MAX, 9}, 0.5) == std::vector<uint64_t>({INT64_MAX, 4}));
  CHECK(scaled(DType::kUint64, std::vector<uint64_t>{UINT64_MAX}, 3) == std::vector<uint64_t>({UINT64_MAX - 2}));
}

// Every one times one is unchanged; a NaN keeps its payload, with every instruction set.
void test_every_small_float() {
  for (DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    const uint32_t infinity = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80,
                   quiet = dtype == DType::kFloat16 ? 0x200 : 0x40;
    std::vector<uint16_t> every(65536), quieted(65536), result(65536);
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      every[bits] = static_cast<uint16_t>(bits);
      quieted[bits] = static_cast<uint16_t>((bits & 0x7fff) > infinity ? bits | quiet : bits);
    }
    scale(dtype, result.data(), every.data(), every.size(), 1.0);
    CHECK(result == every);
    const int row = static_cast<int>(dtype);
    for (const Kernels* kernels : available_kernels()) {
      kernels->scale->table[row](result.data(), every.data(), every.size() - 3, 1.0);
      kernels->scale->table[row](&result[every.size() - 3], &every[every.size() - 3], 3, 1.0);
      CHECK(result == quieted);
      std::vector<float> wide(65536);
      kernels->scale->widening[row](wide.data(), every.data(), every.size(), 0.5);
      kernels->scale->narrowing[row](result.data(), wide.data(), every.size(), 2.0);
      CHECK(result == quieted);
    }
  }
}

void test_small_float_rounding() {
  const uint16_t largest = 0x7bff, smallest = 0x0001, one = 0x3c00;
  uint16_t result = 0;
  scale(DType::kFloat16, &result, &largest, 1, 2.0);
  CHECK(result == 0x7c00);  // infinity
  scale(DType::kFloat16, &result, &smallest, 1, 0.5);
  CHECK(result == 0);  // a tie rounds to even
  scale(DType::kFloat16, &result, &smallest, 1, 1.5);
  CHECK(result == 2);
  scale(DType::kFloat16, &result, &one, 1, 1.0 / 3);
  CHECK(result == 0x3555);
}

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_floats();
  ronde::test_integers();
  ronde::test_every_small_float();
  ronde::test_small_float_rounding();
  return 0;
}
