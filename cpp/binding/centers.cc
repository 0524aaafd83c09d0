// The Python binding of the inner loop of k-means, for ronde/ml/clustering/points.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <string>

#include "binding/border.h"
#include "binding/require_arrays.h"
#include "kernels/nearest_centers.h"

namespace ronde {
namespace {

using Matrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Sums = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Labels = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Distances = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

DType dtype_of(const Matrix& rows, const Matrix& centers) {
  require_arrays(rows.dtype() == centers.dtype(), "rows and centers have different types");
  if (rows.dtype() == nb::dtype<float>()) return DType::kFloat32;
  require_arrays(rows.dtype() == nb::dtype<double>(), "rows are neither float32 nor float64");
  return DType::kFloat64;
}

double assign(const Matrix& rows, const Matrix& centers, const std::optional<Weights>& weights,
              const std::optional<Sums>& sums, const std::optional<Labels>& labels,
              const std::optional<Distances>& squared_distances) {
  const size_t row_count = rows.shape(0), dimensions = rows.shape(1), center_count = centers.shape(0);
  require_arrays(dimensions == centers.shape(1), "rows and centers have different numbers of columns");
  require_arrays(dimensions > 0 && center_count > 0 && center_count <= INT32_MAX, "there are no columns or no centers");
  require_arrays(!weights || weights->shape(0) == row_count, "there is not one weight for each row");
  require_arrays(!sums || (sums->shape(0) == center_count && sums->shape(1) == dimensions + 1),
                 "sums have another shape");
  require_arrays(!labels || labels->shape(0) == row_count, "there is not one label for each row");
  require_arrays(!squared_distances || squared_distances->shape(0) == row_count,
                 "there is not one distance for each row");
  const CenterAssignment assignment{dtype_of(rows, centers),
                                    rows.data(),
                                    centers.data(),
                                    weights ? weights->data() : nullptr,
                                    row_count,
                                    dimensions,
                                    center_count,
                                    sums ? sums->data() : nullptr,
                                    labels ? labels->data() : nullptr,
                                    squared_distances ? squared_distances->data() : nullptr};
  const ReleaseGil released;
  return assign_to_centers(assignment);
}

}  // namespace

void bind_centers(nb::module_& module) {
  using namespace nb::literals;
  module.def("assign_to_centers", &assign, "rows"_a.noconvert(), "centers"_a.noconvert(),
             "weights"_a.none().noconvert(), "sums"_a.none().noconvert(), "labels"_a.none().noconvert(),
             "squared_distances"_a.none().noconvert());
}

}  // namespace ronde
