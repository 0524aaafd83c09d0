// The Python binding of a store's client: one request and its answer in one call.
//
// Where hundreds of clients share a few cores, each finds the caches cold, and a line of Python costs several times as
// much as in a loop. So the path without errors runs no Python besides the method that the user calls.
//
// It uses plain functions of the C API. When the interpreter ends, it forcibly unwinds a daemon thread that takes the
// GIL again, and unwinding through nanobind's dispatch or the destructor of its gil_scoped_release would abort.
#include <nanobind/nanobind.h>
#include <structmember.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/steady_clock.h"
#include "binding/border.h"
#include "binding/keys.h"
#include "stores/store_request.h"

namespace ronde {
namespace {

constexpr size_t kLongestList = size_t{32} << 20;  // of keys, in bytes, as _check_size of tcp.py
constexpr Py_ssize_t kMostDigits = 40;             // of an amount, AMOUNT_DIGITS of base.py
constexpr uint64_t kPatience = 60'000'000'000;     // 60 s: the server's time beyond the request's timeout

bool read_bytes(PyObject* object, std::string_view& view) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(object, &data, &size) != 0) return false;
  view = {data, static_cast<size_t>(size)};
  return true;
}

PyObject* set_connection_error(int error) {
  switch (error) {
    case 0:
      if (PyObject* const errors = PyImport_ImportModule("ronde.errors")) {
        if (PyObject* const type = PyObject_GetAttrString(errors, "ProtocolError")) {
          PyErr_SetString(type, "an answer of the store is malformed");
          Py_DECREF(type);
        }
        Py_DECREF(errors);
      }
      return nullptr;
    case ETIMEDOUT:
      PyErr_SetString(PyExc_TimeoutError, "it does not answer");
      return nullptr;
    case EBADMSG:
      if (PyObject* const arguments =
              Py_BuildValue("(is)", EBADMSG, "its answer was altered, repeated or left out on the way")) {
        PyErr_SetObject(PyExc_OSError, arguments);
        Py_DECREF(arguments);
      }
      return nullptr;
    case ECONNRESET:
      PyErr_SetString(PyExc_ConnectionResetError, "the connection was closed by the other end");
      return nullptr;
    default:
      errno = error;
      return PyErr_SetFromErrno(PyExc_OSError);
  }
}

bool signal_handler_raised() {
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool raised = PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  return raised;
}

// The failure of an exchange: a signal interrupted it, and the handler's exception is set; or the connection broke.
struct ExchangeFailure {
  bool interrupted = false;
  std::optional<int> broken;
  std::string reason;  // of any other failure

  explicit operator bool() const { return interrupted || broken || !reason.empty(); }
};

// Makes one exchange without the GIL. `give_up_ns`: as in Line.
ExchangeFailure exchange(int fd, SealedConnection* seals, StoreRequest request, long long give_up_ns,
                         StoreAnswer& answer) {
  uint64_t patience_ns = kPatience;
  if (give_up_ns != 0) {
    const auto left_ns = static_cast<uint64_t>(std::max<int64_t>(0, give_up_ns - steady_now_ns()));
    request.timeout_ns = std::min(request.timeout_ns, left_ns);
    patience_ns = std::min(kPatience, left_ns - request.timeout_ns);
  }
  ExchangeFailure failure;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    ask_store(fd, request, patience_ns, answer, [] { return signal_handler_raised(); }, seals);
  } catch (const StoreConnectionError& error) {
    failure.broken = error.error;
  } catch (const Interrupted&) {
    failure.interrupted = true;
  } catch (const std::bad_alloc&) {
    failure.broken = ENOMEM;
  } catch (const std::exception& error) {
    failure.reason = error.what();
  }
  PyEval_RestoreThread(state);
  return failure;
}

PyObject* set_native_error(const ExchangeFailure& failure) {
  PyErr_SetString(PyExc_RuntimeError, failure.reason.c_str());
  return nullptr;
}

Py_ssize_t size_of(std::string_view view) { return static_cast<Py_ssize_t>(view.size()); }

// StoreLine, the base class of StoreClient. `_fd` is its connection, or -1; `_number` is the number of its last request
// that must not run twice; the thread that asks, and `_ask_again`, hold `_lock`, a threading.Lock. `_give_up_ns`: when
// a request that the server does not answer ends, on the steady clock; 0: a minute after its timeout. `seals`: the
// connection's, shared with a running call; null if its messages have no tags.
struct Line {
  PyObject_HEAD PyObject* lock;
  unsigned long long number;
  long long give_up_ns;
  int fd;
  std::shared_ptr<SealedConnection>* seals;

  std::shared_ptr<SealedConnection> shared_seals() const { return seals == nullptr ? nullptr : *seals; }
};

PyObject *acquire_name = nullptr, *release_name = nullptr;

// Operations whose key is empty: WAIT, CHECK, NUM_KEYS, MULTI_GET, MULTI_SET and WATCH of wire.py.
constexpr uint32_t kNameless = 1u << 3 | 1u << 7 | 1u << 8 | 1u << 10 | 1u << 11 | 1u << 16;

// Reads a text as a key. Calls `_check_key` for anything else, which raises.
bool read_key(PyObject* self, PyObject* key, std::string_view& view) {
  if (PyUnicode_Check(key)) {
    Py_ssize_t size = 0;
    const char* const data = PyUnicode_AsUTF8AndSize(key, &size);
    if (data != nullptr && size > 0 && static_cast<size_t>(size) <= kLongestKey) {
      view = {data, static_cast<size_t>(size)};
      return true;
    }
    PyErr_Clear();
  }
  PyObject* const checked = PyObject_CallMethod(self, "_check_key", "O", key);
  if (checked != nullptr) PyErr_SetString(PyExc_ValueError, "invalid key: expected a non-empty string");
  Py_XDECREF(checked);
  return false;
}

// Reads the key of a request: None if the operation has none.
bool read_request_key(PyObject* self, PyObject* key, uint8_t operation, std::string_view& view) {
  if (key == Py_None && operation < 32 && (kNameless >> operation & 1) != 0) {
    view = "";  // with an address: Python would turn a null pointer into None
    return true;
  }
  return read_key(self, key, view);
}

// Reads the argument of a request: bytes, or a list of keys, which it packs into `packed`. Calls `_check_size` if they
// are too long for one request, which raises.
bool read_argument(PyObject* self, PyObject* argument, std::string& packed, std::string_view& view) {
  if (!PyList_Check(argument)) return read_bytes(argument, view);
  for (Py_ssize_t i = 0; i < PyList_Size(argument); ++i) {
    std::string_view key;
    if (!read_key(self, PyList_GetItem(argument, i), key)) return false;
    append_key(packed, key);
  }
  view = packed;
  if (packed.size() <= kLongestList) return true;
  PyObject* const checked = PyObject_CallMethod(self, "_check_size", "y#", packed.data(), size_of(packed));
  Py_XDECREF(checked);
  return checked != nullptr;
}

bool read_timeout(PyObject* number, uint64_t& timeout_ns) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
  if (value == -1 && PyErr_Occurred()) return false;
  timeout_ns = overflow > 0 ? INT64_MAX : overflow < 0 || value < 0 ? 0 : static_cast<uint64_t>(value);
  return true;
}

// Lets Python repeat a request whose connection has broken with the exception that is set.
PyObject* ask_again(PyObject* self, const StoreRequest& request, int64_t began_ns) {
  PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  PyObject* const answer = PyObject_CallMethod(
      self, "_ask_again", "iy#y#KKLO", request.operation, request.key.data(), size_of(request.key),
      request.argument.data(), size_of(request.argument), static_cast<unsigned long long>(request.timeout_ns),
      static_cast<unsigned long long>(request.number), static_cast<long long>(began_ns), error);
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(trace);
  return answer;
}

PyObject* ask_locked(Line* line, StoreRequest& request, bool once) {
  PyObject* const self = reinterpret_cast<PyObject*>(line);
  if (once) request.number = ++line->number;
  const int fd = line->fd;
  const int64_t began_ns = steady_now_ns();
  StoreAnswer answer;
  const auto seals = line->shared_seals();
  const ExchangeFailure failure = exchange(fd, seals.get(), request, line->give_up_ns, answer);
  if (failure) {
    if (!failure.reason.empty()) set_native_error(failure);
    if (failure.broken) set_connection_error(*failure.broken);
    if (failure.broken.value_or(0) != 0) return ask_again(self, request, began_ns);
    // The answer may still come and must not be taken for that to another request, so end the connection, unless a
    // signal handler has closed it already.
    if (line->fd == fd) shutdown(fd, SHUT_RDWR);
    return nullptr;
  }
  const std::string_view value = answer.value();
  switch (answer.status()) {
    case 0:
      return PyBytes_FromStringAndSize(value.data(), size_of(value));
    case 1:
      Py_RETURN_NONE;
    default:
      return PyObject_CallMethod(self, "_judge", "iy#", answer.status(), value.data(), size_of(value));
  }
}

PyObject* ask(PyObject* self, StoreRequest& request, bool once) {
  Line* const line = reinterpret_cast<Line*>(self);
  PyObject* const lock = line->lock;  // a signal handler may fork, and the client in the child has another lock
  if (lock == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "_lock");
    return nullptr;
  }
  Py_INCREF(lock);
  PyObject* answer = nullptr;
  if (PyObject* const acquired = PyObject_CallMethodObjArgs(lock, acquire_name, nullptr)) {
    Py_DECREF(acquired);
    answer = ask_locked(line, request, once);
    PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
    if (answer == nullptr) PyErr_Fetch(&type, &error, &trace);
    PyObject* const released = PyObject_CallMethodObjArgs(lock, release_name, nullptr);
    if (released == nullptr) PyErr_Clear();
    Py_XDECREF(released);
    if (answer == nullptr) PyErr_Restore(type, error, trace);
  }
  Py_DECREF(lock);
  return answer;
}

// _ask(operation, key, argument, timeout_ns, once) -> the value of the answer, or None if the answer is ABSENT;
// `argument`: bytes, or a list of keys
PyObject* line_ask(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5) {
    PyErr_SetString(PyExc_TypeError, "_ask takes five arguments");
    return nullptr;
  }
  StoreRequest request;
  std::string keys;
  try {
    request.operation = static_cast<uint8_t>(PyLong_AsLong(arguments[0]));
    if (PyErr_Occurred() || !read_request_key(self, arguments[1], request.operation, request.key) ||
        !read_argument(self, arguments[2], keys, request.argument) || !read_timeout(arguments[3], request.timeout_ns)) {
      return nullptr;
    }
  } catch (const std::exception&) {
    return raise_native_error();
  }
  return ask(self, request, PyObject_IsTrue(arguments[4]) == 1);
}

// Returns the amount in decimal digits, or null with an error. Calls `_check_amount` for one that has too many, which
// raises; Python itself refuses to format numbers of thousands of digits.
PyObject* amount_digits(PyObject* self, PyObject* key, PyObject* amount) {
  PyObject* const digits = PyNumber_ToBase(amount, 10);
  if (digits == nullptr && !PyErr_ExceptionMatches(PyExc_ValueError)) return nullptr;
  if (digits != nullptr) {
    const Py_ssize_t size = PyUnicode_GetLength(digits);
    if (size <= kMostDigits || (size == kMostDigits + 1 && PyUnicode_ReadChar(digits, 0) == '-')) return digits;
    Py_DECREF(digits);
  }
  PyErr_Clear();
  PyObject* const checked = PyObject_CallMethod(self, "_check_amount", "OO", key, amount);
  if (checked != nullptr) PyErr_SetString(PyExc_ValueError, "invalid amount: it has too many digits");
  Py_XDECREF(checked);
  return nullptr;
}

// _add(key, amount) -> the sum
PyObject* line_add(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "_add takes two arguments");
    return nullptr;
  }
  StoreRequest request;
  request.operation = static_cast<uint8_t>(StoreOperation::kAdd);
  if (!read_key(self, arguments[0], request.key)) return nullptr;
  PyObject* const amount = amount_digits(self, arguments[0], arguments[1]);
  if (amount == nullptr) return nullptr;
  Py_ssize_t size = 0;
  const char* const digits = PyUnicode_AsUTF8AndSize(amount, &size);
  PyObject* answer = nullptr;
  if (digits != nullptr) {
    request.argument = {digits, static_cast<size_t>(size)};
    answer = ask(self, request, true);
  }
  Py_DECREF(amount);
  if (answer == nullptr || !PyBytes_Check(answer)) return answer;
  PyObject* const sum = PyLong_FromString(PyBytes_AsString(answer), nullptr, 10);
  Py_DECREF(answer);
  return sum;
}

// _compare_set(key, expected, desired) -> the value that the key then has
PyObject* line_compare_set(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "_compare_set takes three arguments");
    return nullptr;
  }
  StoreRequest request;
  request.operation = static_cast<uint8_t>(StoreOperation::kCompareSet);
  ComparedValues values;
  if (!read_key(self, arguments[0], request.key) || !read_bytes(arguments[1], values.expected) ||
      !read_bytes(arguments[2], values.desired)) {
    return nullptr;
  }
  std::string argument;
  try {
    argument = compared_values(values);
  } catch (const std::exception&) {
    return raise_native_error();
  }
  request.argument = argument;
  return ask(self, request, true);
}

// _ask_once(operation, number, timeout_ns, key, argument) -> (status, value)
PyObject* line_ask_once(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5) {
    PyErr_SetString(PyExc_TypeError, "_ask_once takes five arguments");
    return nullptr;
  }
  StoreRequest request;
  request.operation = static_cast<uint8_t>(PyLong_AsLong(arguments[0]));
  request.number = PyLong_AsUnsignedLongLong(arguments[1]);
  request.timeout_ns = PyLong_AsUnsignedLongLong(arguments[2]);
  if (PyErr_Occurred() || !read_bytes(arguments[3], request.key) || !read_bytes(arguments[4], request.argument)) {
    return nullptr;
  }
  const Line* const line = reinterpret_cast<Line*>(self);
  const auto seals = line->shared_seals();
  StoreAnswer answer;
  const ExchangeFailure failure = exchange(line->fd, seals.get(), request, line->give_up_ns, answer);
  if (failure.interrupted) return nullptr;
  if (failure.broken) return set_connection_error(*failure.broken);
  if (!failure.reason.empty()) return set_native_error(failure);
  return Py_BuildValue("(iy#)", answer.status(), answer.value().data(), size_of(answer.value()));
}

// _use_keys(outgoing, incoming, conceals): sets the keys of a new connection; _use_keys(): it has none
PyObject* line_use_keys(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  Line* const line = reinterpret_cast<Line*>(self);
  try {
    std::shared_ptr<SealedConnection> seals;
    if (count != 0) {
      const auto keys = connection_keys(arguments, count);
      if (!keys) return nullptr;
      seals = std::make_shared<SealedConnection>(*keys);
    }
    if (line->seals == nullptr) line->seals = new std::shared_ptr<SealedConnection>;
    *line->seals = std::move(seals);
  } catch (const std::exception&) {
    return raise_native_error();
  }
  Py_RETURN_NONE;
}

// _sealed(frame) -> the frame with its tag, if the connection has keys
PyObject* line_sealed(PyObject* self, PyObject* frame) {
  std::string_view view;
  if (!read_bytes(frame, view)) return nullptr;
  const auto seals = reinterpret_cast<Line*>(self)->shared_seals();
  if (!seals) return Py_NewRef(frame);
  try {
    const std::string sealed = sealed_frame(view, *seals);
    return PyBytes_FromStringAndSize(sealed.data(), size_of(sealed));
  } catch (const std::exception&) {
    return raise_native_error();
  }
}

void line_dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  delete reinterpret_cast<Line*>(self)->seals;
  Py_XDECREF(reinterpret_cast<Line*>(self)->lock);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyMemberDef line_members[] = {
    {"_lock", T_OBJECT_EX, offsetof(Line, lock), 0, nullptr},
    {"_number", T_ULONGLONG, offsetof(Line, number), 0, nullptr},
    {"_give_up_ns", T_LONGLONG, offsetof(Line, give_up_ns), 0, nullptr},
    {"_fd", T_INT, offsetof(Line, fd), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef line_methods[] = {
    {"_ask", fast(line_ask), METH_FASTCALL, nullptr},
    {"_add", fast(line_add), METH_FASTCALL, nullptr},
    {"_compare_set", fast(line_compare_set), METH_FASTCALL, nullptr},
    {"_ask_once", fast(line_ask_once), METH_FASTCALL, nullptr},
    {"_use_keys", fast(line_use_keys), METH_FASTCALL, nullptr},
    {"_sealed", line_sealed, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot line_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(line_dealloc)},
    {Py_tp_members, line_members},
    {Py_tp_methods, line_methods},
    {0, nullptr},
};

PyType_Spec line_spec = {"ronde._native.StoreLine", sizeof(Line), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                         line_slots};

}  // namespace

void bind_store(nb::module_& module) {
  acquire_name = PyUnicode_InternFromString("acquire");
  release_name = PyUnicode_InternFromString("release");
  PyObject* const line = acquire_name && release_name ? PyType_FromSpec(&line_spec) : nullptr;
  if (line == nullptr || PyModule_AddObject(module.ptr(), "StoreLine", line) != 0) throw nb::python_error();
}

}  // namespace ronde
