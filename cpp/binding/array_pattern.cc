#include "binding/array_pattern.h"

#include <algorithm>

namespace ronde {
namespace {

// Interned, because looking up an attribute by a new string is slow.
struct Names {
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
  PyObject* is_conj = PyUnicode_InternFromString("is_conj");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
};

const Names& names() {
  static const Names kept;
  return kept;
}

nb::object get(nb::handle object, PyObject* name) { return nb::getattr(object, nb::handle(name)); }

bool is_true(const nb::object& value) { return value.is(nb::handle(Py_True)); }

bool says(nb::handle object, PyObject* method) {
  PyObject* const self[] = {object.ptr()};
  // Unlike PyObject_CallMethodNoArgs it is part of the stable ABI.
  PyObject* answer = PyObject_VectorcallMethod(method, self, 1, nullptr);
  if (answer == nullptr) PyErr_Clear();  // not a tensor
  Py_XDECREF(answer);
  return answer == Py_True;
}

// The class `name` of a module that the program has imported, or null. `kept`: where it is kept. It needs no lock: the
// worst that two threads can do is to look it up twice.
PyObject* imported_class(const char* module, const char* name, PyObject*& kept) {
  if (kept == nullptr) {
    PyObject* const modules = PyImport_GetModuleDict();  // borrowed
    PyObject* const found = PyDict_GetItemString(modules, module);
    kept = found == nullptr ? nullptr : PyObject_GetAttrString(found, name);
    if (kept == nullptr) PyErr_Clear();
  }
  return kept;
}

bool is_instance(nb::handle object, PyObject* type) {
  return type != nullptr && PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(type)) != 0;
}

}  // namespace

bool can_be_result(nb::handle object) {
  static PyObject *array = nullptr, *tensor = nullptr;
  return is_instance(object, imported_class("numpy", "ndarray", array)) ||
         is_instance(object, imported_class("torch", "Tensor", tensor));
}

bool may_be_masked(nb::handle object) {
  // Masked arrays are a subclass of NumPy's array, which has no base. So all common types end here.
  PyTypeObject* const type = Py_TYPE(object.ptr());
  if (PyType_GetSlot(type, Py_tp_base) == &PyBaseObject_Type) return false;
  return PyObject_HasAttrString(reinterpret_cast<PyObject*>(type), "mask") != 0;
}

bool is_conj_or_neg(nb::handle object) { return says(object, names().is_conj) || says(object, names().is_neg); }

ArrayPattern::ArrayPattern(nb::handle example, std::vector<int64_t> shape)
    : type_(nb::borrow(example.type())),
      dtype_(get(example, names().dtype)),
      shape_(std::move(shape)),
      shape_tuple_(get(example, names().shape)),
      has_buffer_(PyObject_CheckBuffer(example.ptr()) != 0) {}

std::optional<std::byte*> ArrayPattern::find(nb::handle array, bool is_written) const {
  if (!array.type().is(type_)) return std::nullopt;
  try {
    if (!get(array, names().dtype).is(dtype_)) return std::nullopt;
    return has_buffer_ ? find_buffer(array, is_written) : find_tensor(array);
  } catch (nb::python_error&) {  // for example of a tensor without memory
    return std::nullopt;
  }
}

std::optional<std::byte*> ArrayPattern::find_buffer(nb::handle array, bool is_written) const {
  Py_buffer buffer;
  if (PyObject_GetBuffer(array.ptr(), &buffer, is_written ? PyBUF_STRIDES | PyBUF_WRITABLE : PyBUF_STRIDES) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const bool fits = static_cast<size_t>(buffer.ndim) == shape_.size() &&
                    std::equal(shape_.begin(), shape_.end(), buffer.shape) && PyBuffer_IsContiguous(&buffer, 'C') != 0;
  const auto memory = static_cast<std::byte*>(buffer.buf);
  PyBuffer_Release(&buffer);  // the caller keeps the array alive
  return fits ? std::optional(memory) : std::nullopt;
}

std::optional<std::byte*> ArrayPattern::find_tensor(nb::handle tensor) const {
  const Names& name = names();
  if (!is_true(get(tensor, name.is_cpu)) || !is_true(get(tensor, name.is_contiguous)())) return std::nullopt;
  if (is_conj_or_neg(tensor)) return std::nullopt;
  if (!get(tensor, name.shape).equal(shape_tuple_)) return std::nullopt;
  return reinterpret_cast<std::byte*>(nb::cast<uintptr_t>(get(tensor, name.data_ptr)()));
}

}  // namespace ronde
