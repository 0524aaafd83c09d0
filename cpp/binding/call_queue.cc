// The Python bindings of the call queue: addresses in, calls without the GIL, errors out.
#include "communicator/call_queue.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/steady_clock.h"
#include "binding/border.h"

namespace ronde {
namespace {

using Addresses = std::vector<std::pair<uintptr_t, size_t>>;
using Sizes = std::vector<size_t>;

std::vector<Piece> pieces_at(const Addresses& addresses) {
  std::vector<Piece> pieces;
  pieces.reserve(addresses.size());
  for (const auto& [address, bytes] : addresses) pieces.push_back({reinterpret_cast<std::byte*>(address), bytes});
  return pieces;
}

// Runs `body`, and turns the error of this call into one of Python.
template <class Body>
auto with_errors_of(const Collective& collective, const Communicator& communicator, Body&& body) {
  try {
    return body();
  } catch (const Failure& failure) {
    const std::string host = failure.rank >= 0 ? communicator.host(failure.rank) : "";
    const int64_t timeout_ns = collective.timeout_ns > 0 ? collective.timeout_ns : communicator.timeout_ns();
    raise_failure(failure, host, name_of(collective.kind), timeout_ns);
  } catch (const MismatchError& error) {
    raise("MismatchError", error.what());
  } catch (const UsageError& error) {
    raise("UsageError", error.what());
  } catch (const Interrupted&) {
    throw nb::python_error();
  }
}

// The innermost place of the program itself in this thread's stack, "train.py:12". Empty if there is none, as in a
// thread of a framework.
class ProgramPlace {
 public:
  static std::string find() {
    nb::object frame = nb::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
    for (int depth = 0; depth < kMostFrames && frame.is_valid() && !frame.is_none(); ++depth) {
      if (is_of_program(frame)) return describe(reinterpret_cast<PyFrameObject*>(frame.ptr()));
      frame = frame.attr("f_back");
    }
    return "";
  }

 private:
  static constexpr int kMostFrames = 16;
  static constexpr size_t kMostBytes = 80;  // of a path; reports have more to say

  // Whether its module is neither one of Ronde nor one of the framework that makes the calls.
  static bool is_of_program(nb::handle frame) {
    const nb::object name = nb::borrow<nb::dict>(frame.attr("f_globals")).get("__name__", nb::none());
    const std::string_view module = text_of(name);
    return !module.starts_with("ronde.") && !module.starts_with("torch.");
  }

  // Empty if it is not text, or not valid Unicode.
  static std::string_view text_of(nb::handle object) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_Check(object.ptr()) ? PyUnicode_AsUTF8AndSize(object.ptr(), &size) : nullptr;
    if (text == nullptr) PyErr_Clear();
    return {text, static_cast<size_t>(size)};
  }

  static std::string describe(PyFrameObject* frame) {
    const nb::object code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    const nb::object file = code.attr("co_filename");
    std::string_view path = text_of(file);
    std::string place = path.size() > kMostBytes ? "..." : "";
    while (path.size() > kMostBytes || (!place.empty() && is_inside_character(path.front()))) path.remove_prefix(1);
    return place.append(path) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
  }

  static bool is_inside_character(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }  // UTF-8
};

class PyQueuedCall {
 public:
  // `communicator`: the native one, which knows the hosts' names for errors.
  PyQueuedCall(nb::object communicator, std::shared_ptr<QueuedCall> call)
      : communicator_(std::move(communicator)), call_(std::move(call)) {}

  // A forked child has no thread that would end the call: there it counts as failed.
  bool is_done() const { return !call_->is_pending() || call_->is_lost(); }
  bool has_failed() const { return call_->has_failed() || call_->is_lost(); }

  // Returns false if the time is over. Throws nb::python_error if a signal handler raises an exception.
  bool wait(int64_t timeout_ns) {
    const int64_t end_ns = timeout_ns > 0 ? steady_now_ns() + timeout_ns : INT64_MAX;
    if (call_->is_lost()) raise("UsageError", "this call belongs to the parent of this forked process");
    bool spins = true;
    while (call_->is_pending()) {
      const int64_t left_ns = timeout_ns > 0 ? end_ns - steady_now_ns() : INT64_MAX;
      if (left_ns <= 0) return false;
      const bool is_over = wait_without_gil(std::exchange(spins, false), left_ns);
      if (!is_over && PyErr_CheckSignals() != 0) throw nb::python_error();
    }
    if (call_->has_failed()) raise_error();
    return true;
  }

  // As wait() without a limit, for a caller that does not get this object: its memory may be gone after an exception,
  // so the call must be over then. As in a call of the communicator itself, an exception of a signal handler aborts it.
  void wait_or_abort() {
    try {
      wait(0);
    } catch (nb::python_error&) {
      if (!call_->is_pending()) throw;
      const ReleaseGil released;
      communicator().abort("interrupted by a signal");
      while (!call_->sleep(Completion::kLongestSleepNs)) {
      }
      throw;
    }
  }

 private:
  Communicator& communicator() const { return *nb::inst_ptr<Communicator>(communicator_); }

  bool wait_without_gil(bool spins, int64_t limit_ns) {
    const ReleaseGil released;
    return (spins && call_->spin()) || call_->sleep(limit_ns);
  }

  void raise_error() const {
    with_errors_of(call_->collective(), communicator(), [&] { call_->check(); });
  }

  nb::object communicator_;
  std::shared_ptr<QueuedCall> call_;
};

// The queue as Python has it. The destructor closes it, except in a forked child, which leaks it.
class PyCallQueue {
 public:
  explicit PyCallQueue(nb::handle_t<Communicator> communicator)
      : communicator_(nb::borrow(communicator)),
        queue_(std::make_shared<CallQueue>(*nb::inst_ptr<Communicator>(communicator))),
        over_(nb::cast(new PyQueuedCall(communicator_, QueuedCall::over()), nb::rv_policy::take_ownership)) {
    alive().insert(this);
  }
  ~PyCallQueue() {
    alive().erase(this);
    if (queue_->is_inherited()) {
      new std::shared_ptr<CallQueue>(std::move(queue_));
      return;
    }
    close("its call queue was destroyed");
  }
  PyCallQueue(const PyCallQueue&) = delete;
  PyCallQueue& operator=(const PyCallQueue&) = delete;

  nb::object post(uint8_t kind, uint8_t dtype, uint8_t op, int root, const Addresses& inputs, const Addresses& outputs,
                  Sizes in_sizes, Sizes out_sizes, double factor, int64_t timeout_ns, bool at_once) {
    Collective collective{
        static_cast<Kind>(kind), static_cast<DType>(dtype), static_cast<ReduceOp>(op), root,   pieces_at(inputs),
        pieces_at(outputs),      std::move(in_sizes),       std::move(out_sizes),      factor, timeout_ns};
    return with_errors_of(collective, queue_->communicator(), [&] {
      if (at_once && run_at_once(collective)) return over_;
      collective.posted_at = ProgramPlace::find();
      auto call = std::make_unique<PyQueuedCall>(communicator_, queue_->post(collective));
      if (at_once) call->wait_or_abort();
      return nb::cast(call.release(), nb::rv_policy::take_ownership);
    });
  }

  void close(const std::string& reason) {
    const ReleaseGil released;
    queue_->close(reason);
  }

  // The module registers it to run before the interpreter ends, because a thread of a queue must not outlive it.
  static void close_all() {
    while (!alive().empty()) {
      // A copy, because the object may be destroyed meanwhile.
      const std::shared_ptr<CallQueue> queue = (*alive().begin())->queue_;
      alive().erase(alive().begin());
      const ReleaseGil released;
      queue->close("the interpreter ends");
    }
  }

  // For a forked child. The queue itself knows.
  void abandon() {}

 private:
  bool run_at_once(const Collective& collective) {
    const ReleaseGil released;
    return queue_->try_run(collective);
  }

  // Guarded by the GIL.
  static std::set<PyCallQueue*>& alive() {
    static auto* const queues = new std::set<PyCallQueue*>();
    return *queues;
  }

  nb::object communicator_;
  std::shared_ptr<CallQueue> queue_;
  nb::object over_;  // the call that post() returns if it has made the call itself
};

}  // namespace

void bind_call_queue(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<PyQueuedCall>(module, "QueuedCall")
      .def("is_done", &PyQueuedCall::is_done)
      .def("has_failed", &PyQueuedCall::has_failed)
      .def("wait", &PyQueuedCall::wait, "timeout_ns"_a);
  nb::class_<PyCallQueue>(module, "CallQueue")
      .def(nb::init<nb::handle_t<Communicator>>(), "communicator"_a)
      .def("post", &PyCallQueue::post, "kind"_a, "dtype"_a, "op"_a, "root"_a, "inputs"_a, "outputs"_a, "in_sizes"_a,
           "out_sizes"_a, "factor"_a, "timeout_ns"_a, "at_once"_a)
      .def("close", &PyCallQueue::close, "reason"_a)
      .def("abandon", &abandon_for_good<PyCallQueue>);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&PyCallQueue::close_all));
}

}  // namespace ronde
