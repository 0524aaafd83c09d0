// The Python binding of the inner loop of Lasso and ElasticNet, for ronde/ml/linear/coordinate_descent.py.
#include "kernels/coordinate_descent.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "binding/border.h"

namespace ronde {
namespace {

using ConstMatrix = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstVector = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

size_t descend(const ConstMatrix& matrix, const ConstVector& penalties, const Vector& gradient, const Vector& w,
               double tolerance, size_t max_passes) {
  const size_t size = w.shape(0);
  for (size_t length : {matrix.shape(0), matrix.shape(1), penalties.shape(0), gradient.shape(0)})
    if (length != size) raise("UsageError", "the arrays do not match: expected " + std::to_string(size) + " columns");
  const PenalizedQuadratic point{matrix.data(), penalties.data(), gradient.data(), w.data(), size};
  const ReleaseGil released;
  return descend_coordinates(point, tolerance, max_passes);
}

}  // namespace

void bind_coordinate_descent(nb::module_& module) {
  using namespace nb::literals;
  module.def("descend_coordinates", &descend, "matrix"_a.noconvert(), "penalties"_a.noconvert(),
             "gradient"_a.noconvert(), "w"_a.noconvert(), "tolerance"_a, "max_passes"_a);
}

}  // namespace ronde
