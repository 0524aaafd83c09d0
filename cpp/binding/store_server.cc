// The Python binding of a store's server: one call serves its connections until the interpreter is needed. It receives
// requests and answers the frequent ones itself (binding/store_session.h); another call sends the answers of the
// others.
//
// It uses plain functions of the C API for the reason in binding/store.cc: the server's thread is a daemon, too.
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

#include "base/steady_clock.h"
#include "binding/border.h"
#include "binding/keys.h"
#include "binding/store_session.h"
#include "stores/store_request.h"

namespace ronde {
namespace {

constexpr int kMost = 64;                    // events in one turn
constexpr size_t kReadBytes = 64 << 10;      // a longer request arrives in pieces
static_assert(kReadBytes <= kLongestValue);  // as answer_fast requires
constexpr int64_t kMillisecondNs = 1'000'000;

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

// One connection of a server. It is at rest if it has neither a partly received request nor a partly sent answer.
struct ServedConnection {
  nb::object session;                       // null: the descriptor belongs to no client
  std::unique_ptr<SealedConnection> seals;  // null if its messages have no tags
  bool is_at_rest = false;
};

using Connections = std::vector<ServedConnection>;  // by descriptor
constexpr const char* kConnections = "ronde.StoreConnections";

Connections* connections_in(PyObject* capsule) {
  return static_cast<Connections*>(PyCapsule_GetPointer(capsule, kConnections));
}

// The connection with this descriptor; null if it belongs to no client.
ServedConnection* find_connection(Connections& connections, int fd) {
  if (fd < 0 || static_cast<size_t>(fd) >= connections.size()) return nullptr;
  ServedConnection& connection = connections[static_cast<size_t>(fd)];
  return connection.session.is_valid() ? &connection : nullptr;
}

SealedConnection* seals_of(Connections& connections, int fd) {
  const ServedConnection* const connection = find_connection(connections, fd);
  return connection == nullptr ? nullptr : connection->seals.get();
}

// new_connections() -> an empty container of connections for the functions below
PyObject* new_connections(PyObject*, PyObject*) {
  auto connections = std::make_unique<Connections>();
  PyObject* const capsule =
      PyCapsule_New(connections.get(), kConnections, [](PyObject* capsule) { delete connections_in(capsule); });
  if (capsule != nullptr) connections.release();
  return capsule;
}

// add_connection(connections, fd, session, outgoing, incoming, conceals), or without the keys if its messages have no
// tags
PyObject* add_connection(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count < 3) return wrong_arguments("add_connection takes connections, a descriptor and a session");
  Connections* const connections = connections_in(arguments[0]);
  const long fd = PyLong_AsLong(arguments[1]);
  if (connections == nullptr || PyErr_Occurred()) return nullptr;
  const int is_session = PyObject_IsInstance(arguments[2], session_type);
  if (fd < 0 || is_session <= 0) return wrong_arguments("add_connection takes a descriptor and a session");
  try {
    ServedConnection fresh{nb::borrow(arguments[2]), nullptr, true};
    if (count > 3) {
      const auto keys = connection_keys(arguments + 3, count - 3);
      if (!keys) return nullptr;
      fresh.seals = std::make_unique<SealedConnection>(*keys);
    }
    const auto index = static_cast<size_t>(fd);
    if (connections->size() <= index) connections->resize(index + 1);
    (*connections)[index] = std::move(fresh);
  } catch (const std::exception&) {
    return raise_native_error();
  }
  Py_RETURN_NONE;
}

// remove_connection(connections, fd)
PyObject* remove_connection(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return wrong_arguments("remove_connection takes connections and a descriptor");
  Connections* const connections = connections_in(arguments[0]);
  const int fd = static_cast<int>(PyLong_AsLong(arguments[1]));
  if (connections == nullptr || PyErr_Occurred()) return nullptr;
  if (ServedConnection* const connection = find_connection(*connections, fd)) *connection = {};
  Py_RETURN_NONE;
}

// set_at_rest(connections, fd, is_at_rest)
PyObject* set_at_rest(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) return wrong_arguments("set_at_rest takes connections, a descriptor and a bool");
  Connections* const connections = connections_in(arguments[0]);
  const int fd = static_cast<int>(PyLong_AsLong(arguments[1]));
  if (connections == nullptr || PyErr_Occurred()) return nullptr;
  ServedConnection* const connection = find_connection(*connections, fd);
  if (connection != nullptr) connection->is_at_rest = PyObject_IsTrue(arguments[2]) == 1;
  Py_RETURN_NONE;
}

// read_request(fd, frame, connections) -> (fd, operation, number, timeout_ns, key, argument), or None if it is not a
// valid frame of that connection
PyObject* read_frame(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3 || !PyBytes_Check(arguments[1])) {
    return wrong_arguments("read_request takes an integer, bytes and connections");
  }
  const int fd = static_cast<int>(PyLong_AsLong(arguments[0]));
  Connections* const connections = connections_in(arguments[2]);
  if (PyErr_Occurred()) return nullptr;
  try {
    std::string frame(PyBytes_AsString(arguments[1]), static_cast<size_t>(PyBytes_Size(arguments[1])));
    if (const auto request = read_request(frame, seals_of(*connections, fd))) return as_tuple(fd, *request);
  } catch (const std::exception&) {
    return raise_native_error();
  }
  Py_RETURN_NONE;
}

struct OutgoingAnswer {
  int fd;
  SealedConnection* seals;
  nb::object owner;  // of the memory of `frame`
  std::string_view frame;
  std::string sealed;  // the memory of `frame` if it has a tag
  ssize_t sent;        // -1: the connection is broken
};

OutgoingAnswer outgoing(int fd, SealedConnection* seals, nb::object frame) {
  const std::string_view view(PyBytes_AsString(frame.ptr()), static_cast<size_t>(PyBytes_Size(frame.ptr())));
  return {fd, seals, std::move(frame), view, {}, 0};
}

void send_answer(OutgoingAnswer& answer) {
  if (answer.seals != nullptr) {
    answer.sealed = sealed_frame(answer.frame, *answer.seals);
    answer.frame = answer.sealed;
  }
  answer.sent = send(answer.fd, answer.frame.data(), answer.frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (answer.sent < 0 && (errno == EAGAIN || errno == EINTR)) answer.sent = 0;
}

// Sends as much as possible without blocking and without the GIL. Adds what is left to `unsent`: by descriptor, the
// remaining bytes, or None if the connection is broken. Returns false if an exception is set.
bool send_all(std::vector<OutgoingAnswer>& answers, PyObject* unsent) {
  {
    const ReleaseGil release;
    for (OutgoingAnswer& answer : answers) send_answer(answer);
  }
  for (const OutgoingAnswer& answer : answers) {
    if (answer.sent == static_cast<ssize_t>(answer.frame.size())) continue;
    PyObject* const fd = PyLong_FromLong(answer.fd);
    PyObject* const left =
        answer.sent < 0 ? Py_NewRef(Py_None) : bytes(answer.frame.substr(static_cast<size_t>(answer.sent)));
    const bool done = fd != nullptr && left != nullptr && PyDict_SetItem(unsent, fd, left) == 0;
    Py_XDECREF(fd);
    Py_XDECREF(left);
    if (!done) return false;
  }
  return true;
}

// What one call of serve_requests leaves to Python.
struct Rest {
  nb::object requests = nb::steal(PyList_New(0));
  nb::object others = nb::steal(PyList_New(0));
  nb::object unsent = nb::steal(PyDict_New());

  bool is_valid() const { return requests.is_valid() && others.is_valid() && unsent.is_valid(); }
  bool is_empty() const {
    return PyList_Size(requests.ptr()) == 0 && PyList_Size(others.ptr()) == 0 && PyDict_Size(unsent.ptr()) == 0;
  }
};

// Handles one connection's event: answers a request by the fast path, or leaves it to Python, as a whole request or as
// (fd, events, received bytes or None). Returns false if an exception is set.
bool take_event(const epoll_event& event, ServedConnection* connection, const StoreContent* content, char* buffer,
                std::vector<OutgoingAnswer>& answers, const Rest& rest) {
  const int fd = event.data.fd;
  if (connection == nullptr || !connection->is_at_rest || event.events != EPOLLIN) {
    return append(rest.others.ptr(), Py_BuildValue("(iIO)", fd, event.events, Py_None));
  }
  const ssize_t received = recv(fd, buffer, kReadBytes, MSG_DONTWAIT);
  if (received < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  // A broken connection counts as closed.
  const std::span data(buffer, received > 0 ? static_cast<size_t>(received) : 0);
  const auto request = read_request(data, connection->seals.get());
  if (!request) {
    return append(rest.others.ptr(),
                  Py_BuildValue("(iIy#)", fd, event.events, data.data(), static_cast<Py_ssize_t>(data.size())));
  }
  if (content != nullptr) {
    auto& session = *reinterpret_cast<StoreSession*>(connection->session.ptr());
    if (nb::object answer = answer_fast(*content, session, *request); answer.is_valid()) {
      answers.push_back(outgoing(fd, connection->seals.get(), std::move(answer)));
      return true;
    }
  }
  return append(rest.requests.ptr(), as_tuple(fd, *request));
}

// serve_requests(epoll_fd, timeout_ms, most, connections, content) -> (requests, others, unsent): serves up to `most`
// events in a turn, and returns after the first turn with something for Python, or after the timeout (-1: none).
// `content`: (values, waiting) for the fast path, or None to leave all requests to Python.
PyObject* serve_requests(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5) return wrong_arguments("serve_requests takes three integers, connections and content");
  const int epoll = static_cast<int>(PyLong_AsLong(arguments[0]));
  int timeout_ms = static_cast<int>(PyLong_AsLong(arguments[1]));
  const int most = std::clamp(static_cast<int>(PyLong_AsLong(arguments[2])), 1, kMost);
  Connections* const connections = connections_in(arguments[3]);
  if (PyErr_Occurred()) return nullptr;
  std::optional<StoreContent> content;
  if (arguments[4] != Py_None) {
    StoreContent& given = content.emplace();
    if (!PyArg_ParseTuple(arguments[4], "O!O!", &PyDict_Type, &given.values, &PyDict_Type, &given.waiting)) {
      return nullptr;
    }
  }
  try {
    const Rest rest;
    if (!rest.is_valid()) return nullptr;
    const int64_t deadline_ns = steady_now_ns() + timeout_ms * kMillisecondNs;
    epoll_event events[kMost];
    char buffer[kReadBytes];
    std::vector<OutgoingAnswer> answers;
    answers.reserve(static_cast<size_t>(most));
    while (true) {
      int ready, error;
      {
        const ReleaseGil release;
        ready = epoll_wait(epoll, events, most, timeout_ms);
        error = errno;
      }
      if (ready < 0 && error != EINTR) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
      }
      for (int i = 0; i < ready; ++i) {
        ServedConnection* const connection = find_connection(*connections, events[i].data.fd);
        if (!take_event(events[i], connection, content ? &*content : nullptr, buffer, answers, rest)) return nullptr;
      }
      if (!answers.empty() && !send_all(answers, rest.unsent.ptr())) return nullptr;
      answers.clear();
      if (timeout_ms >= 0) {
        const int64_t left_ns = std::max<int64_t>(0, deadline_ns - steady_now_ns());
        timeout_ms = static_cast<int>((left_ns + kMillisecondNs - 1) / kMillisecondNs);
      }
      if (!rest.is_empty() || ready <= 0 || timeout_ms == 0) {
        return PyTuple_Pack(3, rest.requests.ptr(), rest.others.ptr(), rest.unsent.ptr());
      }
    }
  } catch (nb::python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception&) {
    return raise_native_error();
  }
}

// send_answers({fd: frame}, connections) -> {fd: the remaining bytes, or None if the connection is broken} for the
// frames that it could not send completely
PyObject* send_answers(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyDict_Check(arguments[0])) return wrong_arguments("send_answers takes a dict and connections");
  Connections* const connections = connections_in(arguments[1]);
  if (connections == nullptr) return nullptr;
  try {
    std::vector<OutgoingAnswer> answers;
    answers.reserve(static_cast<size_t>(PyDict_Size(arguments[0])));
    PyObject *key = nullptr, *frame = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(arguments[0], &at, &key, &frame);) {
      if (!PyBytes_Check(frame)) return wrong_arguments("send_answers takes frames of bytes");
      const int fd = static_cast<int>(PyLong_AsLong(key));
      answers.push_back(outgoing(fd, seals_of(*connections, fd), nb::borrow(frame)));
    }
    if (PyErr_Occurred()) return nullptr;
    nb::object unsent = nb::steal(PyDict_New());
    if (!unsent.is_valid() || !send_all(answers, unsent.ptr())) return nullptr;
    return unsent.release().ptr();
  } catch (const std::exception&) {
    return raise_native_error();
  }
}

PyMethodDef methods[] = {
    {"read_request", fast(read_frame), METH_FASTCALL, nullptr},
    {"serve_requests", fast(serve_requests), METH_FASTCALL, nullptr},
    {"send_answers", fast(send_answers), METH_FASTCALL, nullptr},
    {"new_connections", new_connections, METH_NOARGS, nullptr},
    {"add_connection", fast(add_connection), METH_FASTCALL, nullptr},
    {"remove_connection", fast(remove_connection), METH_FASTCALL, nullptr},
    {"set_at_rest", fast(set_at_rest), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_store_server(nb::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw nb::python_error();
}

}  // namespace ronde
