// The Python bindings of the stall inspection, for the thread in ronde/stall/watch.py.
#include "waiting/stalls.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding/border.h"
#include "waiting/call_waits.h"
#include "waiting/stall_hub.h"

namespace ronde {
namespace {

using Ids = std::vector<uint64_t>;

nb::tuple find_waits(Stalls& self, int64_t before_ns, const Ids& ids) {
  const Stalls::FoundWaits found = self.find_waits(before_ns, ids);
  nb::list items;
  for (const Waits::Item& item : found.items) {
    items.append(nb::make_tuple(item.id, item.name, item.kind, item.since_ns, item.is_running, item.is_awaited));
  }
  return nb::make_tuple(items, found.next_ns);
}

// Texts are bytes, because a signal handler's output may not be UTF-8, and an answer's text may end inside a character.
nb::tuple as_tuple(const StallHub::Event& event) {
  using Type = StallHub::Event::Type;
  const int type = static_cast<int>(event.type);
  const nb::bytes text(event.text.data(), event.text.size());
  switch (event.type) {
    case Type::kAsked:
      return nb::make_tuple(event.member, type, event.rank, event.inquiry, event.ids);
    case Type::kAnswer:
      return nb::make_tuple(event.member, type, event.rank, event.inquiry, event.calls, event.is_in_negotiation,
                            event.has, text,
                            nb::make_tuple(event.blocked.where, event.blocked.id, event.blocked.since_ns));
    case Type::kStacks:
      return nb::make_tuple(event.member, type, event.rank, event.inquiry, text, event.is_raw);
    default:
      return nb::make_tuple(event.member, type, event.rank, event.inquiry);
  }
}

nb::object next_events(StallHub& self, int64_t at_ns) {
  std::optional<std::vector<StallHub::Event>> events;
  {
    const ReleaseGil released;
    events = self.next_events(at_ns);
  }
  if (!events) return nb::none();
  nb::list list;
  for (const StallHub::Event& event : *events) list.append(as_tuple(event));
  return list;
}

std::vector<std::optional<std::tuple<uint64_t, uint64_t, int64_t>>> survey(Stalls& self, int64_t timeout_ns) {
  std::vector<std::optional<Waits::Arrivals>> answers;
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

  nb::class_<StallHub>(module, "StallHub")
      .def(nb::init<>())
      .def("next", &next_events)
      .def("stop", &StallHub::stop)
      .def("wake", &StallHub::wake)
      .def("abandon", &abandon_for_good<StallHub>)
      .def("use_stacks", [](StallHub& self, int signal, int file, std::string preface) {
        self.use_stacks(StackTaker(signal, file), std::move(preface));
      });

  nb::class_<Stalls>(module, "Stalls")
      .def_prop_ro("member", &Stalls::member)
      .def("look", &find_waits)
      .def("ask", [](Stalls& self, uint32_t inquiry, const Ids& ids,
                     bool leads_to_report) { self.ask(inquiry, ids, leads_to_report); })
      .def("ask_about",
           [](Stalls& self, uint32_t inquiry, const std::vector<std::tuple<uint64_t, uint64_t, int64_t>>& blocked) {
             std::vector<StallHub::Blocked> sleeps;
             for (const auto& [where, id, since_ns] : blocked) sleeps.push_back({where, id, since_ns});
             self.ask_about(inquiry, sleeps);
           })
      .def("ask_for_stacks", &Stalls::ask_for_stacks)
      .def("answer_stacks", &Stalls::answer_stacks)
      .def("survey", &survey)
      .def("process_of", &Stalls::process_of)
      .def("abort", &Stalls::abort)
      .def("close", &Stalls::close)
      .def("abandon", &abandon_for_good<Stalls>);

  module.def(
      "watch_calls",
      [](Communicator& communicator, std::shared_ptr<StallHub> hub, const std::string& label) {
        return std::make_unique<Stalls>(communicator, std::make_unique<CallWaits>(communicator, label), std::move(hub),
                                        label);
      },
      nb::keep_alive<0, 1>());
}

}  // namespace ronde
