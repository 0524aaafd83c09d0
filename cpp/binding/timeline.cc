// The Python bindings of the timeline, which switch it on and off. The engine records its events.
#include "engine/timeline.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "binding/border.h"

namespace ronde {
namespace {

void start(Timeline& self, std::string path, int rank, int size, std::string host, bool marks_cycles) {
  Timeline::Options options;
  options.path = std::move(path);
  options.rank = rank;
  options.size = size;
  options.host = std::move(host);
  options.marks_cycles = marks_cycles;
  try {
    const ReleaseGil released;
    self.start(options);
  } catch (const UsageError& error) {
    raise("UsageError", error.what());
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, options.path.c_str());
    throw nb::python_error();
  }
}

}  // namespace

void bind_timeline(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<Timeline>(module, "Timeline")
      .def(nb::init<>())
      .def("start", &start, "path"_a, "rank"_a, "size"_a, "host"_a, "marks_cycles"_a)
      .def("stop", &Timeline::stop, nb::call_guard<ReleaseGil>())
      .def("is_on", &Timeline::is_on)
      .def("abandon", &abandon_for_good<Timeline>);
}

}  // namespace ronde
