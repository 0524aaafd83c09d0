// The keys of a connection (ronde/net/authentication.py) as Python passes them.
#pragma once

#include <Python.h>

#include <cstring>
#include <optional>

#include "links/sealer.h"

namespace ronde {

inline bool read_key(PyObject* object, AeadKey& key) {
  if (!PyBytes_Check(object) || PyBytes_Size(object) != static_cast<Py_ssize_t>(key.size())) return false;
  std::memcpy(key.data(), PyBytes_AsString(object), key.size());
  return true;
}

// Reads (outgoing, incoming, conceals). Returns nothing and sets an exception if the arguments are others.
inline std::optional<ConnectionKeys> connection_keys(PyObject* const* arguments, Py_ssize_t count) {
  ConnectionKeys keys;
  if (count != 3 || !read_key(arguments[0], keys.outgoing) || !read_key(arguments[1], keys.incoming)) {
    PyErr_SetString(PyExc_TypeError, "a connection needs two keys of 32 bytes, and whether it conceals");
    return std::nullopt;
  }
  keys.conceals = PyObject_IsTrue(arguments[2]) == 1;
  return keys;
}

}  // namespace ronde
