// The Python bindings of the engine: submissions, handles, and the operations of negotiation rounds.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "binding/array_pattern.h"
#include "binding/backend.h"
#include "binding/border.h"
#include "engine/cycle.h"
#include "engine/cycle_waits.h"
#include "engine/tree.h"
#include "kernels/reduce.h"
#include "waiting/stalls.h"

namespace ronde {
namespace {

class PyCycle;

// One submitted tensor. It owns the completion and the objects that must live until then.
struct Handle {
  Handle(nb::object cycle, std::shared_ptr<Completion> completion)
      : cycle(std::move(cycle)), completion(std::move(completion)) {}

  nb::object cycle;  // a PyCycle
  std::shared_ptr<Completion> completion;
  int64_t slot = -1;           // of a hit
  nb::object result;           // wait() returns it
  nb::object inputs;           // kept alive
  nb::object finish;           // if not None: turns `result` into the value that wait() returns; called until it has
  nb::object error;            // the exception if this tensor alone has failed
  nb::object received_splits;  // of alltoall

  std::recursive_mutex finishing;  // held during a call of `finish`; no thread that has the GIL waits for it
  bool has_driven = false;         // the submission has done the first part of the wait

  std::array<nb::object*, 6> objects() { return {&cycle, &result, &inputs, &finish, &error, &received_splits}; }
  std::array<const nb::object*, 6> objects() const {
    return {&cycle, &result, &inputs, &finish, &error, &received_splits};
  }
};

class PyCycle {
 public:
  PyCycle(Communicator& communicator, nb::handle board, size_t capacity, nb::handle buffer, int64_t linger_ns,
          bool keeps_groups_apart, size_t arity)
      : communicator_(communicator) {
    const auto [board_data, board_bytes] = memory_of(board);
    const auto [buffer_data, buffer_bytes] = memory_of(buffer);
    if (board_bytes < Board::bytes(capacity)) {
      raise("UsageError", "the board has " + std::to_string(board_bytes) + " bytes but needs " +
                              std::to_string(Board::bytes(capacity)));
    }
    cycle_ = std::make_unique<Cycle>(communicator, board_data, capacity, buffer_data, buffer_bytes, linger_ns,
                                     keeps_groups_apart, arity);
    owners_.resize(capacity);
  }

  Cycle& cycle() { return *cycle_; }
  void abandon() { cycle_->abandon(); }
  const Cycle& cycle() const { return *cycle_; }
  Communicator& communicator() const { return communicator_; }

  static std::pair<std::byte*, size_t> memory_of(nb::handle object) {
    if (object.is_none()) return {nullptr, 0};
    if (PyLong_Check(object.ptr())) return {reinterpret_cast<std::byte*>(nb::cast<uintptr_t>(object)), 0};
    Py_buffer buffer;
    if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
    const std::pair memory{static_cast<std::byte*>(buffer.buf), static_cast<size_t>(buffer.len)};
    PyBuffer_Release(&buffer);  // the caller keeps the object alive
    return memory;
  }

  static std::vector<Cycle::Memory> memory_of(const nb::list& in, const nb::list& out) {
    std::vector<Cycle::Memory> memory;
    for (size_t i = 0; i < nb::len(in); ++i) memory.push_back({memory_of(in[i]).first, memory_of(out[i]).first});
    return memory;
  }

  // Returns a handle if the tensor is cached, else None. Raises ValueError if the tensor is in flight.
  nb::object submit(nb::object self, std::string_view name, std::span<const Cycle::Memory> memory,
                    const Signature& signature, bool waits, nb::object result, nb::object inputs) {
    Cycle::Submitted submitted;
    nb::object handle = new_handle(std::move(self));
    try {
      submitted = cycle_->submit(name, signature, memory, waits);
    } catch (const Failure& failure) {
      raise_failure(communicator_, failure);
    } catch (const UsageError& error) {
      raise("UsageError", error.what());
    }
    if (submitted.answer == Cycle::Answer::kMiss) return nb::none();
    if (submitted.answer == Cycle::Answer::kInFlight) {
      throw nb::value_error(
          ("tensor '" + std::string(name) + "' is in flight already: wait for it before you submit it again").c_str());
    }
    return own(std::move(handle), std::move(submitted), std::move(result), std::move(inputs), waits);
  }

  // A hit's handle is made before the submission: until own() returns, no thread may take the interpreter's lock, and
  // making an object may start the garbage collector.
  static nb::object new_handle(nb::object self) {
    return nb::cast(new Handle(std::move(self), nullptr), nb::rv_policy::take_ownership);
  }

  // Returns the handle, as that of a hit. With `waits` it also does the first part of the wait: in a separate call a
  // signal handler could raise an exception before it, and the submission has not woken the leader, which this rank may
  // be.
  nb::object own(nb::object object, Cycle::Submitted submitted, nb::object result, nb::object inputs, bool waits) {
    Handle& handle = *nb::inst_ptr<Handle>(object);
    handle.completion = std::move(submitted.completion);
    handle.slot = submitted.slot;
    handle.result = std::move(result);
    handle.inputs = std::move(inputs);
    nb::object gone = std::exchange(owners_[submitted.slot], object);
    gone.reset();
    if (waits) {
      handle.has_driven = true;
      wait(*handle.completion, Cycle::Patience::kDrive);
    }
    return object;
  }

  // As Cycle::wait(), without the GIL.
  bool wait(Completion& completion, Cycle::Patience patience) {
    try {
      const ReleaseGil released;
      return cycle_->wait(completion, patience);
    } catch (const Failure& failure) {
      raise_failure(communicator_, failure);
    } catch (const UsageError& error) {
      raise("UsageError", error.what());
    } catch (const Interrupted&) {
      throw nb::python_error();
    }
  }

  // Both return the handle of the tensor that was submitted to the slot and does not run from there, or None.
  nb::object evict(uint32_t slot) { return owner_of(slot, cycle_->evict(slot) != nullptr); }
  nb::object take_back(uint32_t slot) { return owner_of(slot, cycle_->take_back(slot) != nullptr); }

  // Drops all handles: a handle owns its cycle, and the garbage collector does not see this cycle's reference to it.
  void release() { owners_.assign(owners_.size(), nb::object()); }

  void drop_handle(Handle& handle) {
    if (handle.slot >= 0 && owners_[handle.slot].is_valid() && nb::inst_ptr<Handle>(owners_[handle.slot]) == &handle) {
      owners_[handle.slot].reset();
    }
  }

 private:
  nb::object owner_of(uint32_t slot, bool is_pending) {
    nb::object owner = std::exchange(owners_.at(slot), nb::object());
    return is_pending ? owner : nb::none();
  }

  Communicator& communicator_;
  std::unique_ptr<Cycle> cycle_;
  std::vector<nb::object> owners_;  // by slot: the handle of the last tensor, which must live until the tensor has run
};

// The last all-reduce or broadcast of one tensor under a name. Submits another one with the same terms, if it is a hit.
class Repeat {
 public:
  // `terms`: as Python describes the operation. `example`: the last tensor. `make`: returns a new array for a result.
  Repeat(nb::object cycle, nb::str name, nb::object terms, const Signature& signature, nb::handle example,
         nb::object make)
      : cycle_(std::move(cycle)),
        key_(nb::cast<std::string>(name)),
        name_(std::move(name)),
        terms_(std::move(terms)),
        signature_(signature),
        pattern_(example, signature.shape),
        make_(std::move(make)) {}

  // Returns a handle, or None: then the caller submits the tensor in the general way, which also raises the errors.
  nb::object submit(nb::handle x, nb::handle out, bool waits) const {
    const auto in_memory = pattern_.find(x, false);
    if (!in_memory) return nb::none();
    nb::object result = out.is_none() ? make_() : nb::borrow(out);
    const auto out_memory = pattern_.find(result, true);
    if (!out_memory || overlap_partly(*in_memory, *out_memory)) return nb::none();
    const Cycle::Memory memory{*in_memory, *out_memory};
    PyCycle& cycle = *nb::inst_ptr<PyCycle>(cycle_);
    nb::object handle = PyCycle::new_handle(cycle_);
    nb::object inputs = nb::make_tuple(name_, terms_, x, result);
    Cycle::Submitted submitted;
    try {
      submitted = cycle.cycle().submit(key_, signature_, {&memory, 1}, waits);
    } catch (const Failure&) {
      return nb::none();
    } catch (const UsageError&) {
      return nb::none();
    }
    if (submitted.answer != Cycle::Answer::kHit) return nb::none();
    return cycle.own(std::move(handle), std::move(submitted), std::move(result), std::move(inputs), waits);
  }

 private:
  bool overlap_partly(const std::byte* in, const std::byte* out) const {
    const auto apart = static_cast<size_t>(std::abs(in - out));
    return apart > 0 && apart < signature_.bytes();
  }

  nb::object cycle_;
  std::string key_;
  nb::str name_;
  nb::object terms_;
  Signature signature_;
  ArrayPattern pattern_;
  nb::object make_;
};

// Turns the result into the value that wait() returns. One thread does so, and the others wait for it.
void finish(Handle& handle) {
  std::unique_lock lock(handle.finishing, std::try_to_lock);
  if (!lock.owns_lock()) {
    const ReleaseGil released;
    lock.lock();
  }
  const nb::object finish = handle.finish;
  if (finish.is_none()) return;
  handle.result = sleeping_at_exit([&] { return finish(handle.result); });
  handle.finish = nb::none();  // if it has raised an error, such as KeyboardInterrupt, the next wait() calls it again
}

nb::object wait(nb::handle_t<Handle> self) {
  // drop_handle() below may drop the last reference but the caller's.
  const nb::object alive = nb::borrow(self);
  Handle& handle = *nb::inst_ptr<Handle>(self);
  PyCycle& owner = *nb::inst_ptr<PyCycle>(handle.cycle);
  auto patience = handle.has_driven ? Cycle::Patience::kSleep : Cycle::Patience::kDrive;
  while (handle.completion->is_pending()) {
    const bool finished = owner.wait(*handle.completion, std::exchange(patience, Cycle::Patience::kSleep));
    if (!finished && PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  owner.drop_handle(handle);
  handle.inputs = nb::none();
  if (handle.completion->has_failed()) {
    if (handle.error.is_valid() && !handle.error.is_none()) {
      // A copy, because the handle must not reference its callers' frames, which reference the handle.
      const nb::object error = nb::module_::import_("ronde.engine.negotiator").attr("fresh")(handle.error);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
      throw nb::python_error();
    }
    raise_failure(owner.communicator(), owner.cycle().failure().value());
  }
  if (handle.finish.is_valid() && !handle.finish.is_none()) finish(handle);
  return handle.result.is_valid() ? handle.result : nb::none();
}

// For the garbage collector: a tensor may have its handle as an attribute.
int traverse_handle(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const Handle& handle = *nb::inst_ptr<Handle>(self);
  for (const nb::object* each : handle.objects()) Py_VISIT(each->ptr());
  return 0;
}

int clear_handle(PyObject* self) {
  Handle& handle = *nb::inst_ptr<Handle>(self);
  // Moves each reference away first: the destructor of its object may access the handle.
  for (nb::object* each : handle.objects()) {
    const nb::object gone = std::move(*each);
  }
  return 0;
}

PyType_Slot handle_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse_handle)},
                              {Py_tp_clear, reinterpret_cast<void*>(&clear_handle)},
                              {0, nullptr}};

void hurry(PyCycle& self) {
  try {
    self.cycle().hurry();
  } catch (const UsageError& error) {
    raise("UsageError", error.what());
  }
}

Signature make_signature(int kind, int dtype, std::vector<int64_t> shape, int op, int root, double prescale,
                         double postscale, std::vector<int64_t> splits, std::string device,
                         const std::vector<std::pair<int, std::vector<int64_t>>>& more) {
  Signature signature{
      static_cast<Kind>(kind), static_cast<DType>(dtype), static_cast<ReduceOp>(op), root, prescale, postscale,
      std::move(shape),        std::move(splits),         std::move(device),         {}};
  for (const auto& [type, dimensions] : more) signature.more.push_back({static_cast<DType>(type), dimensions});
  return signature;
}

// Runs a call that may wait, without the GIL.
template <class Body>
auto guarded(PyCycle& self, Body&& body) {
  try {
    const ReleaseGil released;
    return body();
  } catch (const Failure& failure) {
    raise_failure(self.communicator(), failure);
  } catch (const UsageError& error) {
    raise("UsageError", error.what());
  }
}

// Applies data of a peer, which may be malformed. It does not wait, so it keeps the GIL.
template <class Body>
void apply_sent(const PyCycle& self, Body&& body) {
  try {
    body();
  } catch (const Failure& failure) {
    raise_failure(self.communicator(), failure);
  }
}

// `table`: by Backends::place_of, 0 for the native backend, 1 for the first of `carriers`.
void use_backends(PyCycle& self, const std::vector<nb::object>& carriers, const std::vector<uint8_t>& table) {
  if (table.size() != Backends::kTableSize) {
    raise("UsageError", "the table of backends has " + std::to_string(table.size()) + " entries but needs " +
                            std::to_string(Backends::kTableSize));
  }
  std::vector<std::unique_ptr<Backend>> others;
  for (const nb::object& carrier : carriers) others.push_back(make_python_backend(self.communicator(), carrier));
  self.cycle().backends().use(std::move(others), table);
}

// The timeline's events of negotiation rounds.
void bind_recording(nb::class_<PyCycle>& cycle) {
  cycle
      .def("record_into",
           [](PyCycle& self, std::shared_ptr<Timeline> timeline, std::string label,
              const std::vector<int>& world_ranks) {
             self.cycle().recorder().record_into(std::move(timeline), std::move(label), world_ranks);
           })
      .def("record_submitted", [](PyCycle& self, std::string_view name,
                                  int kind) { self.cycle().recorder().submitted_miss(name, static_cast<Kind>(kind)); })
      .def("record_refused", [](PyCycle& self, std::string_view name) { self.cycle().recorder().refused(name); });
}

void bind_cycle(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<PyCycle> cycle(module, "Cycle");
  bind_recording(cycle);
  cycle
      .def(nb::init<Communicator&, nb::handle, size_t, nb::handle, int64_t, bool, size_t>(), "communicator"_a,
           "board"_a, "capacity"_a, "buffer"_a, "linger_ns"_a, "keeps_groups_apart"_a, "arity"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>())
      .def(
          "submit",
          [](nb::handle_t<PyCycle> self, std::string_view name, nb::handle in, nb::handle out,
             const Signature& signature, bool waits, nb::object result, nb::object inputs) {
            const Cycle::Memory memory{PyCycle::memory_of(in).first, PyCycle::memory_of(out).first};
            return nb::inst_ptr<PyCycle>(self)->submit(nb::borrow(self), name, {&memory, 1}, signature, waits,
                                                       std::move(result), std::move(inputs));
          },
          "name"_a, "input"_a.none(), "output"_a.none(), "signature"_a, "waits"_a, "result"_a.none(), "inputs"_a.none())
      .def("submit_group",
           [](nb::handle_t<PyCycle> self, std::string_view name, const nb::list& in, const nb::list& out,
              const Signature& signature, bool waits, nb::object result, nb::object inputs) {
             return nb::inst_ptr<PyCycle>(self)->submit(nb::borrow(self), name, PyCycle::memory_of(in, out), signature,
                                                        waits, std::move(result), std::move(inputs));
           })
      .def("run",
           [](PyCycle& self) { return guarded(self, [&] { return self.cycle().run() == Cycle::Event::kNegotiate; }); })
      .def("abandon", &abandon_for_good<PyCycle>)
      .def("is_stepping", [](const PyCycle& self) { return self.cycle().is_stepping(); })
      .def("release", &PyCycle::release)
      .def("stop", [](PyCycle& self) { self.cycle().stop(); })
      .def("give_up",
           [](PyCycle& self, int rank, const std::string& reason) {
             guarded(self, [&] {
               const Failure ours(FailureKind::kPeerLost, rank, reason);
               self.cycle().give_up(self.communicator().failure().value_or(ours));
             });
           })
      .def("insert",
           [](PyCycle& self, uint32_t slot, std::string name, const Signature& signature, std::vector<uint64_t> rows) {
             apply_sent(self, [&] { self.cycle().insert(slot, std::move(name), signature, std::move(rows)); });
           })
      .def("evict", &PyCycle::evict)
      .def("take_back", &PyCycle::take_back)
      .def("add_miss",
           [](PyCycle& self, std::string_view name, const Signature& signature, const std::vector<uint64_t>& rows,
              const nb::list& in, const nb::list& out, int contributors, bool is_absent) {
             const auto memory = PyCycle::memory_of(in, out);
             apply_sent(self, [&] { self.cycle().add_miss(name, signature, rows, memory, contributors, is_absent); });
           })
      .def("run_misses", [](PyCycle& self) { guarded(self, [&] { self.cycle().run_misses(); }); })
      .def("join", [](PyCycle& self) { self.cycle().join(); })
      .def("absent", [](PyCycle& self) { self.cycle().absent(); })
      .def("resume", [](PyCycle& self) { self.cycle().resume(); })
      .def("set_contributors", [](PyCycle& self, int count) { self.cycle().set_contributors(count); })
      .def("begin_negotiation", [](PyCycle& self) { self.cycle().begin_negotiation(); })
      .def("end_negotiation", [](PyCycle& self) { guarded(self, [&] { self.cycle().end_negotiation(); }); })
      .def("take_used", [](PyCycle& self) { return guarded(self, [&] { return self.cycle().take_used(); }); })
      .def("want_negotiation", [](PyCycle& self) { self.cycle().want_negotiation(); })
      .def("use_backends", &use_backends, "carriers"_a, "table"_a)
      .def("note_miss",
           [](PyCycle& self, std::string name, int kind, const Handle& handle) {
             self.cycle().pending().add_miss(std::move(name), static_cast<Kind>(kind), handle.completion);
           })
      .def(
          "watch_stalls",
          [](PyCycle& self, std::shared_ptr<StallHub> hub, const std::string& label) {
            return std::make_unique<Stalls>(self.communicator(), std::make_unique<CycleWaits>(self.cycle()),
                                            std::move(hub), label);
          },
          nb::keep_alive<0, 1>());
}

// The parameters of `cycle.tune`, in this order; settings of the same names describe them.
void bind_tuning(nb::module_& module) {
  nb::borrow<nb::class_<PyCycle>>(module.attr("Cycle"))
      .def("tunables",
           [](const PyCycle& self) {
             const Tunables now = self.cycle().tunables();
             return std::vector<uint64_t>{
                 now.fusion_bytes,          static_cast<uint64_t>(now.linger_ns), now.batch_bytes,
                 now.largest_fused_bytes,   now.switch_over.hierarchical_bytes,   now.switch_over.doubling_bytes,
                 now.switch_over.ring_bytes};
           })
      .def("tune",
           [](PyCycle& self, size_t fusion_bytes, int64_t linger_ns, uint64_t batch_bytes, size_t largest_fused_bytes,
              size_t hierarchical_bytes, size_t doubling_bytes, size_t ring_bytes) {
             const Tunables values{fusion_bytes,
                                   linger_ns,
                                   batch_bytes,
                                   largest_fused_bytes,
                                   {hierarchical_bytes, doubling_bytes, ring_bytes}};
             guarded(self, [&] { self.cycle().tune(values); });
           })
      .def("start_meter",
           [](PyCycle& self, uint64_t steps, size_t samples) { self.cycle().meter().start(steps, samples); })
      .def("take_samples", [](PyCycle& self) {
        std::vector<std::pair<uint64_t, int64_t>> samples;
        for (const Meter::Sample& each : self.cycle().meter().take_samples())
          samples.emplace_back(each.bytes, each.busy_ns);
        return samples;
      });
}

}  // namespace

void bind_engine(nb::module_& module) {
  using namespace nb::literals;
  module.def("board_bytes", &Board::bytes, "capacity"_a);
  // For a test: a host's parent and children.
  module.def(
      "tree_around",
      [](size_t host, size_t hosts, size_t arity) {
        const Tree tree{hosts, arity};
        std::vector<int64_t> around{host == 0 ? -1 : static_cast<int64_t>(tree.parent(host))};
        for (size_t child = 0; child < tree.child_count(host); ++child) {
          around.push_back(static_cast<int64_t>(tree.first_child(host) + child));
        }
        return around;
      },
      "host"_a, "hosts"_a, "arity"_a);
  module.def("is_supported",
             [](int dtype, int op) { return is_supported(static_cast<DType>(dtype), static_cast<ReduceOp>(op)); });

  nb::class_<Signature>(module, "Signature")
      .def("__init__", [](Signature* self, int kind, int dtype, std::vector<int64_t> shape, int op, int root,
                          double prescale, double postscale, std::vector<int64_t> splits, std::string device,
                          const std::vector<std::pair<int, std::vector<int64_t>>>& more) {
        new (self) Signature(make_signature(kind, dtype, std::move(shape), op, root, prescale, postscale,
                                            std::move(splits), std::move(device), more));
      });

  nb::class_<Handle>(module, "Handle", nb::is_weak_referenceable(), nb::type_slots(handle_slots),
                     "An operation on its way. Functions that end in `_async` return one.")
      .def("__init__",
           [](Handle* self, nb::object cycle) { new (self) Handle(std::move(cycle), std::make_shared<Completion>()); })
      .def("wait", &wait, "Wait until the operation is complete. Return its result, or raise its error.")
      .def(
          "done",
          [](const Handle& self) {
            if (self.completion->is_pending() && self.slot >= 0) hurry(*nb::inst_ptr<PyCycle>(self.cycle));
            return !self.completion->is_pending();
          },
          "Return whether the operation is complete, so that `wait` returns or raises at once.")
      .def("complete", [](Handle& self) { self.completion->finish(true); })
      .def("fail",
           [](Handle& self, nb::object error) {
             self.error = std::move(error);
             self.completion->finish(false);
           })
      .def_rw("result", &Handle::result)
      .def_rw("inputs", &Handle::inputs)
      .def_rw("finish", &Handle::finish)
      .def_rw("received_splits", &Handle::received_splits);
  nb::object alias = nb::module_::import_("types").attr("GenericAlias");  // so that Handle[Tensor] can be written
  module.attr("Handle").attr("__class_getitem__") = nb::module_::import_("builtins").attr("classmethod")(alias);
  bind_cycle(module);
  nb::class_<Repeat>(module, "Repeat")
      .def(nb::init<nb::object, nb::str, nb::object, const Signature&, nb::handle, nb::object>())
      .def("submit", &Repeat::submit, "x"_a, "out"_a.none(), "waits"_a);
  bind_stalls(module);
  bind_tuning(module);
}

}  // namespace ronde
