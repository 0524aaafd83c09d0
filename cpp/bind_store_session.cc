#include "bind_store_session.h"

#include <structmember.h>

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

namespace ronde {
namespace {

nb::object to_bytes(std::string_view value) {
  PyObject* const object = PyBytes_FromStringAndSize(value.data(), static_cast<Py_ssize_t>(value.size()));
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

std::string_view view_of(PyObject* bytes) {
  return {PyBytes_AsString(bytes), static_cast<size_t>(PyBytes_Size(bytes))};
}

nb::object answer_of(std::string_view value) {
  PyObject* const frame = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(kAnswerHeadBytes + value.size()));
  if (frame == nullptr) throw nb::python_error();
  char* const place = PyBytes_AsString(frame);
  write_answer_head(place, 0, value.size());
  value.copy(place + kAnswerHeadBytes, value.size());
  return nb::steal(frame);
}

// The key's value, a borrowed reference; null if there is none.
PyObject* find_value(const StoreContent& content, const nb::object& key) {
  PyObject* const value = PyDict_GetItemWithError(content.values, key.ptr());
  if (value == nullptr && PyErr_Occurred()) throw nb::python_error();
  return value;
}

void set_value(const StoreContent& content, const nb::object& key, std::string_view value) {
  if (PyDict_SetItem(content.values, key.ptr(), to_bytes(value).ptr()) != 0) throw nb::python_error();
}

nb::object get(const StoreContent& content, const nb::object& key) {
  PyObject* const value = find_value(content, key);
  return value == nullptr ? nb::object() : answer_of(view_of(value));
}

nb::object wait_for(const StoreContent& content, std::string_view keys) {
  while (!keys.empty()) {
    const auto key = take_key(keys);
    if (!key || key->size() > kLongestKey || find_value(content, to_bytes(*key)) == nullptr) return {};
  }
  return answer_of("");
}

nb::object add(const StoreContent& content, const nb::object& key, std::string_view argument) {
  PyObject* const value = find_value(content, key);
  const auto number = read_decimal(value == nullptr ? "0" : view_of(value));
  const auto amount = read_decimal(argument);
  if (!number || !amount) return {};
  char text[24];
  const char* const end = std::to_chars(text, std::end(text), *number + *amount).ptr;
  const std::string_view sum(text, static_cast<size_t>(end - text));
  set_value(content, key, sum);
  return answer_of(sum);
}

nb::object compare_set(const StoreContent& content, const nb::object& key, std::string_view argument) {
  const auto compared = read_compared_values(argument);
  if (!compared) return {};
  PyObject* const value = find_value(content, key);
  const std::string_view present = value == nullptr ? "" : view_of(value);
  if (present != compared->expected) return answer_of(present);
  set_value(content, key, compared->desired);
  return answer_of(compared->desired);
}

nb::object answer_keyed(const StoreContent& content, const StoreRequest& request) {
  if (request.key.empty()) return {};
  const nb::object key = to_bytes(request.key);
  const auto operation = StoreOperation{request.operation};
  if (operation == StoreOperation::kGet) return get(content, key);
  const int waited_for = PyDict_Contains(content.waiting, key.ptr());
  if (waited_for < 0) throw nb::python_error();
  if (waited_for != 0) return {};
  switch (operation) {
    case StoreOperation::kSet:
      set_value(content, key, request.argument);
      return answer_of("");
    case StoreOperation::kAdd:
      return add(content, key, request.argument);
    case StoreOperation::kCompareSet:
      return compare_set(content, key, request.argument);
    default:
      return {};
  }
}

void session_dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  Py_XDECREF(reinterpret_cast<StoreSession*>(self)->answer);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyMemberDef session_members[] = {
    {"number", T_ULONGLONG, offsetof(StoreSession, number), 0, nullptr},
    {"answer", T_OBJECT_EX, offsetof(StoreSession, answer), 0, nullptr},
    {"is_parked", T_BOOL, offsetof(StoreSession, is_parked), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot session_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(session_dealloc)},
    {Py_tp_members, session_members},
    {0, nullptr},
};

PyType_Spec session_spec = {"ronde._native.StoreSession", sizeof(StoreSession), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, session_slots};

}  // namespace

PyObject* session_type = nullptr;

nb::object answer_fast(const StoreContent& content, StoreSession& session, const StoreRequest& request) {
  if (request.key.size() > kLongestKey) return {};
  const bool must_run_once = request.number != 0;
  if (session.is_parked != 0 || (must_run_once && request.number == session.number)) return {};
  nb::object answer = StoreOperation{request.operation} == StoreOperation::kWait ? wait_for(content, request.argument)
                                                                                 : answer_keyed(content, request);
  if (answer.is_valid() && must_run_once) {
    session.number = request.number;
    PyObject* const last = std::exchange(session.answer, Py_NewRef(answer.ptr()));
    Py_XDECREF(last);
  }
  return answer;
}

void bind_store_session(nb::module_& module) {
  session_type = PyType_FromSpec(&session_spec);
  if (session_type == nullptr || PyModule_AddObject(module.ptr(), "StoreSession", session_type) != 0) {
    throw nb::python_error();
  }
}

}  // namespace ronde
