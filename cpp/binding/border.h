// Common to the bind*.cc: turns the data plane's errors into those of ronde.errors, and releases the GIL while waiting.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "binding/gil.h"
#include "communicator/communicator.h"

namespace nb = nanobind;

namespace ronde {

void bind_call_queue(nb::module_& module);
void bind_centers(nb::module_& module);
void bind_connections(nb::module_& module);
void bind_coordinate_descent(nb::module_& module);
void bind_engine(nb::module_& module);
void bind_mailbox(nb::module_& module);
void bind_stalls(nb::module_& module);
void bind_store(nb::module_& module);
void bind_store_server(nb::module_& module);
void bind_store_session(nb::module_& module);
void bind_timeline(nb::module_& module);
void bind_words(nb::module_& module);
void bind_topics(nb::module_& module);
void bind_trees(nb::module_& module);

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

// The function as a table of methods has it, with METH_FASTCALL.
inline PyCFunction fast(FastCall function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// For a forked child: abandons the object and leaks it. Other threads of the parent may have been changing it at the
// fork, so not even its destructor may access it.
template <class Class>
void abandon_for_good(nb::handle_t<Class> self) {
  nb::inst_ptr<Class>(self)->abandon();
  self.inc_ref();
}

// Makes the exception that is being handled one of Python; for functions that Python calls without nanobind.
inline std::nullptr_t raise_native_error() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <class... Args>
[[noreturn]] void raise(const char* name, Args&&... args) {
  const nb::object type = nb::module_::import_("ronde.errors").attr(name);
  const nb::object error = sleeping_at_exit([&] { return type(std::forward<Args>(args)...); });
  PyErr_SetObject(type.ptr(), error.ptr());
  throw nb::python_error();
}

// `host`: the host of the failure's rank. `call`, `timeout_ns`: the call that waited too long, and its limit.
[[noreturn]] inline void raise_failure(const Failure& failure, const std::string& host, const std::string& call = "",
                                       int64_t timeout_ns = 0) {
  switch (failure.kind) {
    case FailureKind::kMismatch:
      raise("MismatchError", failure.what());
    case FailureKind::kAborted:
      raise("AbortedError", failure.what(), failure.rank, host);
    case FailureKind::kTimeout:
      raise("TimeoutError", failure.what(), call, timeout_ns, nb::tuple(nb::cast(failure.missing)));
    default:
      raise("PeerLostError", failure.what(), failure.rank, host);
  }
}

[[noreturn]] inline void raise_failure(const Communicator& communicator, const Failure& failure) {
  const std::string host = failure.rank >= 0 ? communicator.host(failure.rank) : "";
  raise_failure(failure, host, communicator.last_call(), communicator.timeout_ns());
}

// Runs the part of a call that may wait.
template <class Body>
void without_gil(const Communicator& communicator, Body&& body) {
  try {
    const ReleaseGil released;
    body();
  } catch (const Failure& failure) {
    raise_failure(communicator, failure);
  } catch (const MismatchError& error) {
    raise("MismatchError", error.what());
  } catch (const UsageError& error) {
    raise("UsageError", error.what());
  } catch (const Interrupted&) {
    throw nb::python_error();  // the signal handler has set it
  }
}

}  // namespace ronde
