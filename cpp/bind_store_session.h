// What the server of a store remembers of one client, and the fast path for its requests.
//
// The fast path answers a frequent request from the dictionaries of table.py and request_handler.py, without running
// Python. It answers a request only if that is valid and new, and neither waits nor wakes another one. The request
// handler, which knows all the rules, answers the others.
#pragma once

#include <nanobind/nanobind.h>

#include "bind_border.h"
#include "store_request.h"

namespace ronde {

// StoreSession, the base class of ClientSession: the number of its last request that must not run twice, the frame of
// the answer to it (bytes), and whether a request of it waits.
struct StoreSession {
  PyObject_HEAD unsigned long long number;
  PyObject* answer;
  char is_parked;
};

extern PyObject* session_type;

// The dictionaries of a store: its values by key, and the keys for which requests wait.
struct StoreContent {
  PyObject* values;
  PyObject* waiting;
};

// Returns the frame of the answer (bytes), or a null object if Python must answer. Throws nb::python_error if there is
// not enough memory. The request must be shorter than the limit of a value.
nb::object answer_fast(const StoreContent& content, StoreSession& session, const StoreRequest& request);

}  // namespace ronde
