// Backends that are written in Python (ronde/backends).
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "engine/backend.h"

namespace ronde {

// `carrier`: an object with the methods of ronde.backends.carrier.Carrier.
std::unique_ptr<Backend> make_python_backend(Communicator& communicator, nanobind::object carrier);

}  // namespace ronde
