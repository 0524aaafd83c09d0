// The border to Python of the inspection of stalls; ronde/engine/stalls.py is the thread that uses it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_border.h"
#include "engine/stalls.h"

namespace ronde {
namespace {

using Ids = std::vector<uint64_t>;

nb::tuple look(Stalls& self, int64_t before_ns, const Ids& ids) {
  const Stalls::Look found = self.look(before_ns, ids);
  nb::list items;
  for (const Stalls::Item& item : found.items) {
    items.append(nb::make_tuple(item.id, item.name, name_of(item.kind), item.since_ns, item.is_running));
  }
  return nb::make_tuple(items, found.next_ns);
}

// Bytes, because what a signal handler has written is not always a text.
nb::tuple as_tuple(const Stalls::Event& event) {
  const int type = static_cast<int>(event.type);
  switch (event.type) {
    case Stalls::Event::Type::kAsked:
      return nb::make_tuple(type, event.rank, event.inquiry, event.ids);
    case Stalls::Event::Type::kAnswer:
      return nb::make_tuple(type, event.rank, event.inquiry, event.calls, event.is_in_cold_round, event.has);
    case Stalls::Event::Type::kStacks:
      return nb::make_tuple(type, event.rank, event.inquiry, nb::bytes(event.text.data(), event.text.size()),
                            event.is_raw);
    default:
      return nb::make_tuple(type, event.rank, event.inquiry);
  }
}

nb::object next(Stalls& self, int64_t at_ns) {
  std::optional<std::vector<Stalls::Event>> events;
  {
    const ReleaseGil released;
    events = self.next(at_ns);
  }
  if (!events) return nb::none();
  nb::list list;
  for (const Stalls::Event& event : *events) list.append(as_tuple(event));
  return list;
}

std::vector<std::optional<std::tuple<uint64_t, uint64_t, int64_t>>> survey(Stalls& self, int64_t timeout_ns) {
  std::vector<std::optional<Cycle::Arrivals>> answers;
  {
    const ReleaseGil released;
    answers = self.survey(timeout_ns);
  }
  std::vector<std::optional<std::tuple<uint64_t, uint64_t, int64_t>>> result(answers.size());
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    if (answers[rank]) result[rank] = {answers[rank]->tensors, answers[rank]->last, answers[rank]->waited_ns};
  }
  return result;
}

}  // namespace

void bind_stalls(nb::module_& module) {
  using namespace nb::literals;
  module.def("has_handler", [](int signal) { return StackTaker::handler_of(signal) != SIG_DFL; });

  nb::class_<Stalls>(module, "Stalls")
      .def("look", &look)
      .def("next", &next)
      .def("stop", &Stalls::stop)
      .def("ask", [](Stalls& self, uint32_t inquiry, const Ids& ids) { self.ask(inquiry, ids); })
      .def("ask_for_stacks", &Stalls::ask_for_stacks)
      .def("answer_stacks", &Stalls::answer_stacks)
      .def("use_stacks", [](Stalls& self, int signal, int file,
                            std::string preface) { self.use_stacks(StackTaker(signal, file), std::move(preface)); })
      .def("survey", &survey)
      .def("process_of", &Stalls::process_of)
      .def("abandon", &abandon_for_good<Stalls>);
}

}  // namespace ronde
