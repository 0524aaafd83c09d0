// An array of Python, as the native side reads and writes it.
//
// Arrays enter by the buffer protocol, which is faster for NumPy, or by DLPack. An array that neither protocol exports
// as it is (not contiguous, an element type that the exporter cannot name, another device) is refused, and
// ronde/comm/arrays.py converts it or raises an error.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "base/types.h"
#include "binding/array_pattern.h"
#include "binding/border.h"

namespace ronde {

// An array's memory, type and shape. Keeps the memory alive while a call uses it.
class Array {
 public:
  Array() = default;
  ~Array() {
    if (has_buffer_) PyBuffer_Release(&buffer_);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  // Returns false if neither protocol exports `object` as a contiguous array in main memory.
  bool load(nb::handle object, bool writable) {
    if (PyObject_CheckBuffer(object.ptr())) return !may_be_masked(object) && load_buffer(object, writable);
    // nanobind also exports a tensor that PyTorch refuses to export because its values are not those in memory.
    return !is_conj_or_neg(object) && load_dlpack(object, writable);
  }

  // The same for an `out` of the user, which arrays.py has not checked.
  bool load_result(nb::handle object) { return can_be_result(object) && load(object, true); }

  // The same for a new array whose type and shape are known. It skips them because NumPy takes long to export them.
  bool load_memory(nb::handle object) {
    if (!PyObject_CheckBuffer(object.ptr())) return load_dlpack(object, true);
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE | PyBUF_WRITABLE) != 0) {
      PyErr_Clear();
      return false;
    }
    has_buffer_ = true;
    data_ = buffer_.buf;
    bytes_ = static_cast<size_t>(buffer_.len);
    return true;
  }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  std::optional<DType> dtype() const { return dtype_; }
  size_t count() const { return bytes_ / size_of(*dtype_); }
  bool has_shape_of(const Array& other) const {
    return dimensions_ == other.dimensions_ && std::equal(shape_, shape_ + dimensions_, other.shape_);
  }
  std::span<const int64_t> axes() const { return {shape_, dimensions_}; }
  std::string shape() const {
    std::string text = "(";
    for (size_t axis = 0; axis < dimensions_; ++axis) text += (axis > 0 ? ", " : "") + std::to_string(shape_[axis]);
    return text + (dimensions_ == 1 ? ",)" : ")");
  }

 private:
  bool load_buffer(nb::handle object, bool writable) {
    const int flags = PyBUF_FORMAT | PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0) {
      PyErr_Clear();
      return false;
    }
    has_buffer_ = true;
    if (!PyBuffer_IsContiguous(&buffer_, 'C')) return false;
    data_ = buffer_.buf;
    bytes_ = static_cast<size_t>(buffer_.len);
    dtype_ = dtype_of_format(buffer_.format, static_cast<size_t>(buffer_.itemsize));
    static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
    shape_ = reinterpret_cast<const int64_t*>(buffer_.shape);
    dimensions_ = static_cast<size_t>(buffer_.ndim);
    return true;
  }

  // Without conversion, because the call must access the caller's memory, not a copy.
  bool load_dlpack(nb::handle object, bool writable) {
    if (writable) return nb::try_cast(object, writable_, false) && take_dlpack(writable_);
    return nb::try_cast(object, readable_, false) && take_dlpack(readable_);
  }

  template <class NdArray>
  bool take_dlpack(const NdArray& array) {
    data_ = const_cast<void*>(static_cast<const void*>(array.data()));
    bytes_ = array.nbytes();
    dtype_ = dtype_of_dlpack(array.dtype());
    shape_ = array.shape_ptr();
    dimensions_ = array.ndim();
    return true;
  }

  // A format of the struct module; native byte order only.
  static std::optional<DType> dtype_of_format(const char* format, size_t item_bytes) {
    if (format == nullptr) return DType::kUint8;
    if (*format == '@' || *format == '=' || *format == '<') ++format;
    const bool is_complex = *format == 'Z';
    if (is_complex) ++format;
    if (format[0] == 0 || format[1] != 0) return std::nullopt;
    if (is_complex) {
      return *format == 'f' ? std::optional(DType::kComplex64)
                            : (*format == 'd' ? std::optional(DType::kComplex128) : std::nullopt);
    }
    if (*format == '?') return DType::kBool;
    if (*format == 'e') return DType::kFloat16;
    if (*format == 'f') return DType::kFloat32;
    if (*format == 'd') return DType::kFloat64;
    // The sizes of C's integer types differ between platforms, so the item's size decides.
    if (std::strchr("bhilqn", *format) != nullptr) return integer(DType::kInt8, item_bytes);
    if (std::strchr("BHILQN", *format) != nullptr) return integer(DType::kUint8, item_bytes);
    return std::nullopt;
  }

  static std::optional<DType> integer(DType smallest, size_t item_bytes) {
    const int steps = item_bytes == 1 ? 0 : item_bytes == 2 ? 1 : item_bytes == 4 ? 2 : item_bytes == 8 ? 3 : -1;
    if (steps < 0) return std::nullopt;
    return static_cast<DType>(static_cast<int>(smallest) + steps);
  }

  static std::optional<DType> dtype_of_dlpack(nb::dlpack::dtype dtype) {
    if (dtype.lanes != 1 || dtype.bits % 8 != 0) return std::nullopt;
    const size_t item_bytes = dtype.bits / 8;
    switch (static_cast<nb::dlpack::dtype_code>(dtype.code)) {
      case nb::dlpack::dtype_code::Bool:
        return DType::kBool;
      case nb::dlpack::dtype_code::Int:
        return integer(DType::kInt8, item_bytes);
      case nb::dlpack::dtype_code::UInt:
        return integer(DType::kUint8, item_bytes);
      case nb::dlpack::dtype_code::Float:
        if (item_bytes == 2) return DType::kFloat16;
        if (item_bytes == 4) return DType::kFloat32;
        return item_bytes == 8 ? std::optional(DType::kFloat64) : std::nullopt;
      case nb::dlpack::dtype_code::Bfloat:
        return DType::kBfloat16;
      case nb::dlpack::dtype_code::Complex:
        if (item_bytes == 8) return DType::kComplex64;
        return item_bytes == 16 ? std::optional(DType::kComplex128) : std::nullopt;
      default:
        return std::nullopt;
    }
  }

  bool has_buffer_ = false;
  Py_buffer buffer_{};
  nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu> readable_;
  nb::ndarray<nb::c_contig, nb::device::cpu> writable_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  std::optional<DType> dtype_;
  const int64_t* shape_ = nullptr;
  size_t dimensions_ = 0;
};

// Whether the two have bytes in common.
inline bool overlap(const Array& a, const Array& b) {
  const auto *one = static_cast<const std::byte*>(a.data()), *other = static_cast<const std::byte*>(b.data());
  return one < other + b.bytes() && other < one + a.bytes();
}

}  // namespace ronde
