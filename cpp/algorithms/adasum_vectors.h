// The arithmetic of Adasum on pieces of vectors: products of pairs, and the weighted sums that follow from them.
//
// Squares of float64 numbers can leave the range of float64: the square of 1e200 is infinite, that of 1e-200 is zero.
// Such a vector is first multiplied by a power of two, which changes no bit of the result. No other type needs this,
// because products are float64. A vector of zeros needs no scale and no second pass.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "algorithms/chunks.h"
#include "base/types.h"

namespace ronde {

constexpr size_t kProducts = 3;  // of each pair of vectors: a.a, a.b, b.b

// Sums of products, and the powers of two by which the vectors of each pair were multiplied first (empty: none).
struct Sums {
  std::span<const double> products;
  std::span<const int> exponents;  // two per pair: of a and of b
};

// The powers of two that the vectors of each pair need, judged by their products; empty if none needs one.
std::vector<int> exponents_for(DType dtype, std::span<const double> products);

class ScaledSums {
 public:
  // `products` are those of whole vectors and equal on all ranks that work on them. So all of these ranks agree whether
  // form(exponents) must form and sum the products again.
  template <class Form>
  ScaledSums(DType dtype, std::vector<double> products, Form&& form)
      : products_(std::move(products)), exponents_(exponents_for(dtype, products_)) {
    if (!exponents_.empty()) products_ = form(std::span<const int>(exponents_));
  }

  // The sums of `count` pairs, from pair `first` on.
  Sums of(size_t first, size_t count) const {
    const std::span products(products_);
    const std::span exponents(exponents_);
    return {products.subspan(first * kProducts, count * kProducts),
            exponents.empty() ? exponents : exponents.subspan(first * 2, count * 2)};
  }
  Sums all() const { return {products_, exponents_}; }

 private:
  std::vector<double> products_;
  std::vector<int> exponents_;
};

// The vectors that lie one behind the other in a buffer; works on the pieces of them that lie in a range.
class Vectors {
 public:
  Vectors(DType dtype, std::span<const size_t> counts);

  std::vector<double> no_products() const { return std::vector<double>(kProducts * ends_.size()); }

  // Adds the products of the pieces in `range`. `a` and `b` point to the beginning of the range.
  void add_products(const std::byte* a, const std::byte* b, const Range& range, std::span<double> products,
                    std::span<const int> exponents = {}) const;

  // Combines the pieces in `range` by the products of the whole vectors. `out` may be `a` or `b`.
  void combine(std::byte* out, const std::byte* a, const std::byte* b, const Range& range, const Sums& sums) const;

 private:
  template <class Body>
  void for_each_piece(const Range& range, Body&& body) const;

  DType dtype_;
  std::vector<size_t> ends_;
};

}  // namespace ronde
