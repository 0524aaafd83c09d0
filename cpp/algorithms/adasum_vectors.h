// The arithmetic of Adasum on pieces of vectors: the products of pairs, and the weighted sums that follow from them.
//
// Squares of float64 numbers can leave the range of float64: those of 1e200 are infinite, those of 1e-200 are zero.
// Then the vector is multiplied by a power of two first, which changes no bit of the result. No other type has that
// problem. A vector of zeros needs no scale, and costs no second pass.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "algorithms/chunks.h"
#include "types.h"

namespace ronde {

constexpr size_t kProducts = 3;  // of each pair of vectors: a.a, a.b, b.b

// Sums of products, and by which powers of two the vectors of each pair were multiplied before (nothing: by none).
struct Sums {
  std::span<const double> products;
  std::span<const int> exponents;  // two per pair: of a and of b
};

// Which powers of two the vectors of each pair need, after their products; empty if none does.
std::vector<int> exponents_for(DType dtype, std::span<const double> products);

class ScaledSums {
 public:
  // `products`: of whole vectors, the same on all ranks that work on them; so they agree whether form(exponents) has to
  // form and sum them again.
  template <class Form>
  ScaledSums(DType dtype, std::vector<double> products, Form&& form)
      : products_(std::move(products)), exponents_(exponents_for(dtype, products_)) {
    if (!exponents_.empty()) products_ = form(std::span<const int>(exponents_));
  }

  // Of the vectors number `first` and so on.
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

// What two ranges of elements and a list of vectors have to do with each other.
class Vectors {
 public:
  Vectors(DType dtype, std::span<const size_t> counts);

  std::vector<double> no_products() const { return std::vector<double>(kProducts * ends_.size()); }

  // Adds the products of the pieces that lie in `range`. `a` and `b` point to where the range begins.
  void add_products(const std::byte* a, const std::byte* b, const Range& range, std::span<double> products,
                    std::span<const int> exponents = {}) const;

  // Combines the pieces that lie in `range`, with the products of the whole vectors. `out` may be `a` or `b`.
  void combine(std::byte* out, const std::byte* a, const std::byte* b, const Range& range, const Sums& sums) const;

 private:
  template <class Body>
  void for_each_piece(const Range& range, Body&& body) const;

  DType dtype_;
  std::vector<size_t> ends_;
};

}  // namespace ronde
