// Recognizes the array of a repeated call, and finds its memory without Python code.
//
// A pattern is taken from an array that Python code has checked (comm/arrays). It finds the memory of NumPy arrays and
// PyTorch tensors of exactly the same class, dtype and shape that are contiguous and in main memory. Any other array is
// left to the Python code.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace ronde {

// Returns whether the object is a tensor whose values are its memory's conjugated or negated (`x.conj()`).
bool is_conj_or_neg(nb::handle object);
// Returns whether the object may be a masked array of NumPy, which offers its memory without the mask.
bool may_be_masked(nb::handle object);
// Returns whether the object is a NumPy array or a tensor: only these may receive results.
bool can_be_result(nb::handle object);

class ArrayPattern {
 public:
  // `example`: a NumPy array, or a tensor.
  ArrayPattern(nb::handle example, std::vector<int64_t> shape);

  // Returns the memory, nullopt of an array that differs. `is_written`: it also has to be writable.
  std::optional<std::byte*> find(nb::handle array, bool is_written) const;

 private:
  std::optional<std::byte*> find_buffer(nb::handle array, bool is_written) const;
  std::optional<std::byte*> find_tensor(nb::handle tensor) const;

  nb::object type_;
  nb::object dtype_;
  std::vector<int64_t> shape_;
  nb::object shape_tuple_;
  bool has_buffer_;  // tensors have none
};

}  // namespace ronde
