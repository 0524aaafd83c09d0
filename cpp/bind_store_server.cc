// The border to Python of a store's server: what all clients ask in one turn of its loop comes with one call, and their
// answers leave with one, so that the interpreter sees whole requests and no system calls.
//
// Plain functions of the C API, for the reason in bind_store.cc: the server's thread is a daemon, too.
#define PY_SSIZE_T_CLEAN
#include <nanobind/nanobind.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <iterator>
#include <new>
#include <string_view>
#include <vector>

#include "bind_border.h"
#include "store_request.h"

namespace ronde {
namespace {

constexpr int kMost = 64;                // events of one turn
constexpr size_t kReadBytes = 64 << 10;  // what is longer comes in pieces

PyObject* wrong_arguments(const char* right) {
  PyErr_SetString(PyExc_TypeError, right);
  return nullptr;
}

// Appends what it is given and drops it; false: an exception is set.
bool append(PyObject* list, PyObject* item) {
  if (item == nullptr) return false;
  const bool done = PyList_Append(list, item) == 0;
  Py_DECREF(item);
  return done;
}

PyObject* number(uint64_t value) { return PyLong_FromUnsignedLongLong(value); }

PyObject* bytes(std::string_view value) {
  return PyBytes_FromStringAndSize(value.data(), static_cast<Py_ssize_t>(value.size()));
}

// (fd, operation, number, timeout_ns, key, argument). Py_BuildValue would take as long as the rest of a request's way.
PyObject* as_tuple(int fd, const StoreRequest& request) {
  PyObject* const items[] = {PyLong_FromLong(fd),    PyLong_FromLong(request.operation),
                             number(request.number), number(request.timeout_ns),
                             bytes(request.key),     bytes(request.argument)};
  PyObject* const tuple = PyTuple_New(std::size(items));
  bool complete = tuple != nullptr;
  for (PyObject* const item : items) complete = complete && item != nullptr;
  for (size_t i = 0; i < std::size(items); ++i) {
    if (complete) {
      PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), items[i]);
    } else {
      Py_XDECREF(items[i]);
    }
  }
  if (complete) return tuple;
  Py_XDECREF(tuple);
  return nullptr;
}

// read_request(fd, frame) -> (fd, operation, number, timeout_ns, key, argument), or None if it is not a frame
PyObject* read(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyBytes_Check(arguments[1])) return wrong_arguments("read_request takes an integer and bytes");
  const int fd = static_cast<int>(PyLong_AsLong(arguments[0]));
  if (PyErr_Occurred()) return nullptr;
  const std::string_view frame(PyBytes_AsString(arguments[1]), static_cast<size_t>(PyBytes_Size(arguments[1])));
  if (const auto request = read_request(frame)) return as_tuple(fd, *request);
  Py_RETURN_NONE;
}

// One connection's event: a whole request, or something that Python looks into: (fd, events, what has come or None).
bool take(const epoll_event& event, bool at_rest, char* buffer, PyObject* requests, PyObject* others) {
  const int fd = event.data.fd;
  if (!at_rest || event.events != EPOLLIN) return append(others, Py_BuildValue("(iIO)", fd, event.events, Py_None));
  const ssize_t received = recv(fd, buffer, kReadBytes, MSG_DONTWAIT);
  if (received < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  // What is broken has hung up.
  const std::string_view data(buffer, received > 0 ? static_cast<size_t>(received) : 0);
  if (const auto request = read_request(data)) return append(requests, as_tuple(fd, *request));
  return append(others, Py_BuildValue("(iIy#)", fd, event.events, data.data(), static_cast<Py_ssize_t>(data.size())));
}

// take_requests(epoll_fd, timeout_ms, most, at_rest) -> (requests, others): waits until something comes from somebody,
// and returns that of up to `most`. Of `at_rest`, a byte for each descriptor, it takes what members are that have
// nothing half received or half sent.
PyObject* take_all(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4 || !PyByteArray_Check(arguments[3])) {
    return wrong_arguments("take_requests takes three integers and a bytearray");
  }
  const int epoll = static_cast<int>(PyLong_AsLong(arguments[0]));
  const int timeout_ms = static_cast<int>(PyLong_AsLong(arguments[1]));
  const int most = std::clamp(static_cast<int>(PyLong_AsLong(arguments[2])), 1, kMost);
  if (PyErr_Occurred()) return nullptr;
  epoll_event events[kMost];
  PyThreadState* const state = PyEval_SaveThread();
  const int ready = epoll_wait(epoll, events, most, timeout_ms);
  const int error = errno;
  PyEval_RestoreThread(state);
  if (ready < 0 && error != EINTR) {
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
  }

  const std::string_view at_rest(PyByteArray_AsString(arguments[3]),
                                 static_cast<size_t>(PyByteArray_Size(arguments[3])));
  char buffer[kReadBytes];
  PyObject* const requests = PyList_New(0);
  PyObject* const others = PyList_New(0);
  bool done = requests != nullptr && others != nullptr;
  for (int i = 0; done && i < ready; ++i) {
    const auto fd = static_cast<size_t>(events[i].data.fd);
    done = take(events[i], fd < at_rest.size() && at_rest[fd] != 0, buffer, requests, others);
  }
  PyObject* const both = done ? PyTuple_Pack(2, requests, others) : nullptr;
  Py_XDECREF(requests);
  Py_XDECREF(others);
  return both;
}

struct Letter {
  int fd;
  std::string_view frame;
  ssize_t sent;  // -1: the connection is broken
};

// send_answers({fd: frame}) -> {fd: bytes sent, or -1 if it is broken} of those that could not be sent in whole
PyObject* send_all(PyObject*, PyObject* answers) {
  if (!PyDict_Check(answers)) return wrong_arguments("send_answers takes a dict");
  std::vector<Letter> letters;
  try {
    letters.reserve(static_cast<size_t>(PyDict_Size(answers)));
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  PyObject *fd = nullptr, *frame = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(answers, &at, &fd, &frame);) {
    if (!PyBytes_Check(frame)) return wrong_arguments("send_answers takes frames of bytes");
    letters.push_back(
        {static_cast<int>(PyLong_AsLong(fd)), {PyBytes_AsString(frame), static_cast<size_t>(PyBytes_Size(frame))}, 0});
  }
  if (PyErr_Occurred()) return nullptr;
  PyThreadState* const state = PyEval_SaveThread();
  for (Letter& letter : letters) {
    letter.sent = send(letter.fd, letter.frame.data(), letter.frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (letter.sent < 0 && (errno == EAGAIN || errno == EINTR)) letter.sent = 0;
  }
  PyEval_RestoreThread(state);
  PyObject* const unsent = PyDict_New();
  for (const Letter& letter : letters) {
    if (unsent == nullptr || letter.sent == static_cast<ssize_t>(letter.frame.size())) continue;
    PyObject* const key = PyLong_FromLong(letter.fd);
    PyObject* const sent = PyLong_FromSsize_t(letter.sent);
    const bool done = key != nullptr && sent != nullptr && PyDict_SetItem(unsent, key, sent) == 0;
    Py_XDECREF(key);
    Py_XDECREF(sent);
    if (!done) {
      Py_DECREF(unsent);
      return nullptr;
    }
  }
  return unsent;
}

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyCFunction fast(FastCall function) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)); }

PyMethodDef methods[] = {
    {"read_request", fast(read), METH_FASTCALL, nullptr},
    {"take_requests", fast(take_all), METH_FASTCALL, nullptr},
    {"send_answers", send_all, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_store_server(nb::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw nb::python_error();
}

}  // namespace ronde
