#include "algorithms/adasum_vectors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "kernels/reduce.h"

namespace ronde {
namespace {

constexpr double kLargestSquare = 0x1p1000, kSmallestSquare = 0x1p-900;
constexpr int kExponent = 600;
// Replaces a square that underflows to zero although the piece of the vector is not zero.
constexpr double kVanished = std::numeric_limits<double>::min();

int exponent_for(double square) {
  if (square > kLargestSquare) return -kExponent;
  return square > 0 && square < kSmallestSquare ? kExponent : 0;
}

// Up to kMost numbers of a float64 vector, multiplied by 2^exponent.
class Scaled {
 public:
  static constexpr size_t kMost = 512;

  Scaled(const std::byte* vector, size_t first, size_t count, int exponent) {
    std::memcpy(numbers_, vector + first * sizeof(double), count * sizeof(double));
    if (exponent == 0) return;
    for (size_t i = 0; i < count; ++i) numbers_[i] = std::ldexp(numbers_[i], exponent);
  }
  const double* data() const { return numbers_; }

 private:
  double numbers_[kMost];
};

// add_dot_products() of float64 vectors, after multiplying each by its power of two.
void add_scaled_products(const std::byte* a, const std::byte* b, std::span<const int> exponents, size_t count,
                         double* products) {
  for (size_t first = 0; first < count; first += Scaled::kMost) {
    const size_t items = std::min(Scaled::kMost, count - first);
    const Scaled scaled_a(a, first, items, exponents[0]), scaled_b(b, first, items, exponents[1]);
    add_dot_products(DType::kFloat64, scaled_a.data(), scaled_b.data(), items, products);
  }
}

bool has_numbers(const std::byte* vector, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    double number = 0;
    std::memcpy(&number, vector + i * sizeof(number), sizeof(number));
    if (number != 0) return true;
  }
  return false;
}

// A vector of zeros has no direction, so its weight is 1.
double weight(double product, double square) { return square == 0 ? 1 : 1 - product / (2 * square); }

// How a vector of a scaled pair enters the sum: times 2^up, then times the weight. `up` brings a vector shorter than 1
// to about length 1; without it the weight may exceed the range of float64 if the other vector is much longer.
struct Share {
  int up;
  double weight;
};

// `product` and `square` belong to the scaled vectors. `exponent` is this vector's scale, `other` the other vector's.
Share share_of(double product, double square, int exponent, int other) {
  if (square == 0) return {0, 1};
  const int up = std::isfinite(square) ? std::max(0, exponent - std::ilogb(square) / 2) : 0;
  return {up, std::ldexp(1.0, -up) - std::ldexp(product / (2 * square), exponent - other - up)};
}

void combine_scaled(std::byte* out, const std::byte* a, const std::byte* b, size_t count, const double* products,
                    std::span<const int> exponents) {
  const Share share_a = share_of(products[1], products[0], exponents[0], exponents[1]);
  const Share share_b = share_of(products[1], products[2], exponents[1], exponents[0]);
  for (size_t first = 0; first < count; first += Scaled::kMost) {
    const size_t items = std::min(Scaled::kMost, count - first);
    const Scaled scaled_a(a, first, items, share_a.up), scaled_b(b, first, items, share_b.up);
    weighted_sum(DType::kFloat64, out + first * sizeof(double), scaled_a.data(), share_a.weight, scaled_b.data(),
                 share_b.weight, items);
  }
}

// The exponents of one pair; empty if its vectors need no scale.
std::span<const int> exponents_of(std::span<const int> exponents, size_t pair) {
  if (exponents.empty()) return exponents;
  const auto own = exponents.subspan(2 * pair, 2);
  return own[0] == 0 && own[1] == 0 ? std::span<const int>() : own;
}

}  // namespace

std::vector<int> exponents_for(DType dtype, std::span<const double> products) {
  std::vector<int> exponents;
  if (dtype != DType::kFloat64) return exponents;
  for (size_t i = 0; i < products.size(); i += kProducts) {
    for (const double square : {products[i], products[i + 2]}) exponents.push_back(exponent_for(square));
  }
  const bool is_any = std::any_of(exponents.begin(), exponents.end(), [](int exponent) { return exponent != 0; });
  if (!is_any) exponents.clear();
  return exponents;
}

Vectors::Vectors(DType dtype, std::span<const size_t> counts) : dtype_(dtype), ends_(counts.size()) {
  std::inclusive_scan(counts.begin(), counts.end(), ends_.begin());
}

// Calls body(vector, offset of its piece in the range in bytes, elements of the piece).
template <class Body>
void Vectors::for_each_piece(const Range& range, Body&& body) const {
  const size_t end = range.begin + range.count;
  size_t begin = range.begin;
  size_t vector = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
  for (; begin < end; ++vector) {
    const size_t piece_end = std::min(end, ends_[vector]);
    if (piece_end > begin) body(vector, (begin - range.begin) * size_of(dtype_), piece_end - begin);
    begin = piece_end;
  }
}

void Vectors::add_products(const std::byte* a, const std::byte* b, const Range& range, std::span<double> products,
                           std::span<const int> exponents) const {
  for_each_piece(range, [&](size_t vector, size_t offset, size_t count) {
    double* const sums = &products[kProducts * vector];
    const auto own = exponents_of(exponents, vector);
    if (!own.empty()) return add_scaled_products(a + offset, b + offset, own, count, sums);
    add_dot_products(dtype_, a + offset, b + offset, count, sums);
    if (dtype_ != DType::kFloat64) return;
    if (sums[0] == 0 && has_numbers(a + offset, count)) sums[0] = kVanished;
    if (sums[2] == 0 && has_numbers(b + offset, count)) sums[2] = kVanished;
  });
}

void Vectors::combine(std::byte* out, const std::byte* a, const std::byte* b, const Range& range,
                      const Sums& sums) const {
  for_each_piece(range, [&](size_t vector, size_t offset, size_t count) {
    const double* const products = &sums.products[kProducts * vector];
    const auto own = exponents_of(sums.exponents, vector);
    if (!own.empty()) return combine_scaled(out + offset, a + offset, b + offset, count, products, own);
    weighted_sum(dtype_, out + offset, a + offset, weight(products[1], products[0]), b + offset,
                 weight(products[1], products[2]), count);
  });
}

}  // namespace ronde
