// The Python binding of a store's server: one call receives the requests of all clients in one turn of its loop, and
// one call sends their answers, so that the interpreter handles whole requests and makes no system calls.
//
// It uses plain functions of the C API for the reason in bind_store.cc: the server's thread is a daemon, too.
#include <nanobind/nanobind.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <iterator>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind_border.h"
#include "bind_keys.h"
#include "store_request.h"

namespace ronde {
namespace {

constexpr int kMost = 64;                // events in one turn
constexpr size_t kReadBytes = 64 << 10;  // a longer request arrives in pieces

PyObject* wrong_arguments(const char* right) {
  PyErr_SetString(PyExc_TypeError, right);
  return nullptr;
}

// Appends `item` and drops the reference. Returns false if an exception is set.
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

// (fd, operation, number, timeout_ns, key, argument). Py_BuildValue would take as long as the rest of the request.
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

// The seals of a server's connections, by descriptor; null for those whose messages have no tags.
using Seals = std::vector<std::unique_ptr<SealedConnection>>;
constexpr const char* kSeals = "ronde.StoreSeals";

Seals* seals_in(PyObject* capsule) { return static_cast<Seals*>(PyCapsule_GetPointer(capsule, kSeals)); }

SealedConnection* seals_of(const Seals& seals, int fd) {
  return fd >= 0 && static_cast<size_t>(fd) < seals.size() ? seals[static_cast<size_t>(fd)].get() : nullptr;
}

// new_seals() -> an empty container of seals for the functions below
PyObject* new_seals(PyObject*, PyObject*) {
  auto seals = std::make_unique<Seals>();
  PyObject* const capsule = PyCapsule_New(seals.get(), kSeals, [](PyObject* capsule) { delete seals_in(capsule); });
  if (capsule != nullptr) seals.release();
  return capsule;
}

// set_seals(seals, fd, outgoing, incoming, conceals): sets the keys of a new connection; set_seals(seals, fd): it has
// none
PyObject* set_seals(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count < 2) return wrong_arguments("set_seals takes seals and a descriptor");
  Seals* const seals = seals_in(arguments[0]);
  const long fd = PyLong_AsLong(arguments[1]);
  if (seals == nullptr || PyErr_Occurred()) return nullptr;
  if (fd < 0) return wrong_arguments("a descriptor is not negative");
  try {
    std::unique_ptr<SealedConnection> fresh;
    if (count > 2) {
      const auto keys = connection_keys(arguments + 2, count - 2);
      if (!keys) return nullptr;
      fresh = std::make_unique<SealedConnection>(*keys);
    }
    const auto index = static_cast<size_t>(fd);
    if (fresh && seals->size() <= index) seals->resize(index + 1);
    if (index < seals->size()) (*seals)[index] = std::move(fresh);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  Py_RETURN_NONE;
}

// read_request(fd, frame, seals) -> (fd, operation, number, timeout_ns, key, argument), or None if it is not a valid
// frame of that connection
PyObject* read_frame(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3 || !PyBytes_Check(arguments[1])) {
    return wrong_arguments("read_request takes an integer, bytes and seals");
  }
  const int fd = static_cast<int>(PyLong_AsLong(arguments[0]));
  const Seals* const seals = seals_in(arguments[2]);
  if (PyErr_Occurred()) return nullptr;
  try {
    std::string frame(PyBytes_AsString(arguments[1]), static_cast<size_t>(PyBytes_Size(arguments[1])));
    if (const auto request = read_request(frame, seals_of(*seals, fd))) return as_tuple(fd, *request);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  Py_RETURN_NONE;
}

// Handles one connection's event: appends a whole request to `requests`, or (fd, events, received bytes or None) to
// `others`, for Python.
bool take_event(const epoll_event& event, bool at_rest, SealedConnection* seals, char* buffer, PyObject* requests,
                PyObject* others) {
  const int fd = event.data.fd;
  if (!at_rest || event.events != EPOLLIN) return append(others, Py_BuildValue("(iIO)", fd, event.events, Py_None));
  const ssize_t received = recv(fd, buffer, kReadBytes, MSG_DONTWAIT);
  if (received < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  // A broken connection counts as closed.
  const std::span data(buffer, received > 0 ? static_cast<size_t>(received) : 0);
  if (const auto request = read_request(data, seals)) return append(requests, as_tuple(fd, *request));
  return append(others, Py_BuildValue("(iIy#)", fd, event.events, data.data(), static_cast<Py_ssize_t>(data.size())));
}

// take_requests(epoll_fd, timeout_ms, most, at_rest, seals) -> (requests, others): waits for events and returns up to
// `most` of them. `at_rest` has a byte for each descriptor, which is not 0 for a member without a partly received
// request and without a partly sent answer; only from these does it receive.
PyObject* take_requests(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5 || !PyByteArray_Check(arguments[3])) {
    return wrong_arguments("take_requests takes three integers, a bytearray and seals");
  }
  const int epoll = static_cast<int>(PyLong_AsLong(arguments[0]));
  const int timeout_ms = static_cast<int>(PyLong_AsLong(arguments[1]));
  const int most = std::clamp(static_cast<int>(PyLong_AsLong(arguments[2])), 1, kMost);
  const Seals* const seals = seals_in(arguments[4]);
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
    const bool rests = fd < at_rest.size() && at_rest[fd] != 0;
    done = take_event(events[i], rests, seals_of(*seals, events[i].data.fd), buffer, requests, others);
  }
  PyObject* const both = done ? PyTuple_Pack(2, requests, others) : nullptr;
  Py_XDECREF(requests);
  Py_XDECREF(others);
  return both;
}

struct OutgoingAnswer {
  int fd;
  SealedConnection* seals;
  std::string_view frame;
  std::string sealed;  // the memory of `frame` if it has a tag
  ssize_t sent;        // -1: the connection is broken
};

void send_answer(OutgoingAnswer& answer) {
  if (answer.seals != nullptr) {
    answer.sealed = sealed_frame(answer.frame, *answer.seals);
    answer.frame = answer.sealed;
  }
  answer.sent = send(answer.fd, answer.frame.data(), answer.frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (answer.sent < 0 && (errno == EAGAIN || errno == EINTR)) answer.sent = 0;
}

// Sends as much as possible without blocking and without the GIL. Returns false if there is not enough memory.
bool send_all(std::vector<OutgoingAnswer>& answers) {
  PyThreadState* const state = PyEval_SaveThread();
  bool done = true;
  try {
    for (OutgoingAnswer& answer : answers) send_answer(answer);
  } catch (const std::bad_alloc&) {
    done = false;
  }
  PyEval_RestoreThread(state);
  return done;
}

// send_answers({fd: frame}, seals) -> {fd: the remaining bytes, or None if the connection is broken} for the frames
// that it could not send completely
PyObject* send_answers(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyDict_Check(arguments[0])) return wrong_arguments("send_answers takes a dict and seals");
  const Seals* const seals = seals_in(arguments[1]);
  if (seals == nullptr) return nullptr;
  std::vector<OutgoingAnswer> answers;
  try {
    answers.reserve(static_cast<size_t>(PyDict_Size(arguments[0])));
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  PyObject *key = nullptr, *frame = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(arguments[0], &at, &key, &frame);) {
    if (!PyBytes_Check(frame)) return wrong_arguments("send_answers takes frames of bytes");
    const int fd = static_cast<int>(PyLong_AsLong(key));
    const std::string_view view(PyBytes_AsString(frame), static_cast<size_t>(PyBytes_Size(frame)));
    answers.push_back({fd, seals_of(*seals, fd), view, {}, 0});
  }
  if (PyErr_Occurred()) return nullptr;
  if (!send_all(answers)) return PyErr_NoMemory();
  PyObject* const unsent = PyDict_New();
  for (const OutgoingAnswer& answer : answers) {
    if (unsent == nullptr || answer.sent == static_cast<ssize_t>(answer.frame.size())) continue;
    PyObject* const fd = PyLong_FromLong(answer.fd);
    PyObject* const left =
        answer.sent < 0 ? Py_NewRef(Py_None) : bytes(answer.frame.substr(static_cast<size_t>(answer.sent)));
    const bool done = fd != nullptr && left != nullptr && PyDict_SetItem(unsent, fd, left) == 0;
    Py_XDECREF(fd);
    Py_XDECREF(left);
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
    {"read_request", fast(read_frame), METH_FASTCALL, nullptr},
    {"take_requests", fast(take_requests), METH_FASTCALL, nullptr},
    {"send_answers", fast(send_answers), METH_FASTCALL, nullptr},
    {"new_seals", new_seals, METH_NOARGS, nullptr},
    {"set_seals", fast(set_seals), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_store_server(nb::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw nb::python_error();
}

}  // namespace ronde
