// The Python bindings of the mailbox. Memory is an address; Python keeps it alive until the message has ended.
#include "messages/mailbox.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/steady_clock.h"
#include "binding/border.h"

namespace ronde {
namespace {

// A mailbox, and the communicator that must outlive it.
class PyMailbox {
 public:
  explicit PyMailbox(nb::object communicator)
      : communicator_(std::move(communicator)),
        mailbox_(std::make_unique<Mailbox>(nb::cast<Communicator&>(communicator_))) {}
  ~PyMailbox() {
    if (mailbox_->is_abandoned()) {  // by a forked child, where its thread does not exist
      mailbox_.release();
      communicator_.release();
      return;
    }
    const ReleaseGil released;
    mailbox_.reset();
  }
  PyMailbox(const PyMailbox&) = delete;
  PyMailbox& operator=(const PyMailbox&) = delete;

  void abandon() { mailbox_->abandon(); }
  Mailbox& mailbox() { return *mailbox_; }
  const Communicator& communicator() const { return *nb::inst_ptr<Communicator>(communicator_); }

 private:
  nb::object communicator_;
  std::unique_ptr<Mailbox> mailbox_;
};

struct PyMessage {
  nb::object owner;  // a PyMailbox
  Mailbox::Handle message;
};

uint32_t checked_tag(int64_t tag) {
  if (tag < 0 || tag > std::numeric_limits<uint32_t>::max()) {
    raise("UsageError", "a tag must be between 0 and 4294967295, not " + std::to_string(tag));
  }
  return static_cast<uint32_t>(tag);
}

template <class Post>
PyMessage post(nb::handle_t<PyMailbox> self, Post&& post) {
  PyMailbox& owner = *nb::inst_ptr<PyMailbox>(self);
  Mailbox::Handle message;
  without_gil(owner.communicator(), [&] { message = post(owner.mailbox()); });
  return {nb::borrow(self), std::move(message)};
}

PyMessage post_send(nb::handle_t<PyMailbox> self, int peer, uint64_t context, int64_t tag, uintptr_t address,
                    size_t nbytes) {
  const uint32_t number = checked_tag(tag);
  return post(self, [&](Mailbox& mailbox) {
    return mailbox.send(peer, context, number, reinterpret_cast<const void*>(address), nbytes);
  });
}

PyMessage post_receive(nb::handle_t<PyMailbox> self, int peer, uint64_t context, int64_t tag, uintptr_t address,
                       size_t nbytes, std::vector<int> peers) {
  const uint32_t number = checked_tag(tag);
  return post(self, [&](Mailbox& mailbox) {
    return mailbox.receive(peer, context, number, reinterpret_cast<void*>(address), nbytes, std::move(peers));
  });
}

bool wait_for_message(const PyMessage& self, int64_t timeout_ns) {
  const nb::object owner = self.owner;
  const Mailbox::Handle message = self.message;
  PyMailbox& mailbox = *nb::inst_ptr<PyMailbox>(owner);
  const int64_t now_ns = steady_now_ns();
  const bool has_limit = timeout_ns >= 0 && timeout_ns < std::numeric_limits<int64_t>::max() - now_ns;
  const int64_t until_ns = has_limit ? now_ns + timeout_ns : std::numeric_limits<int64_t>::max();
  while (message->is_pending()) {
    if (mailbox.mailbox().is_abandoned()) {
      raise("UsageError", "this message belongs to the parent of this forked process");
    }
    {
      const ReleaseGil released;
      mailbox.mailbox().wait(*message, until_ns);
    }
    if (!message->is_pending()) break;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (steady_now_ns() >= until_ns) return false;
  }
  if (message->has_failed()) raise_failure(mailbox.communicator(), message->failure());
  return true;
}

int source_of(const PyMessage& self) {
  if (self.message->is_pending() || self.message->source() < 0) {
    raise("UsageError", "only a receive that is done has a source");
  }
  return self.message->source();
}

}  // namespace

void bind_mailbox(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<PyMessage>(module, "Message", "A message posted to a mailbox.")
      .def("is_done", [](const PyMessage& self) { return !self.message->is_pending(); })
      .def("has_failed", [](const PyMessage& self) { return self.message->has_failed(); })
      .def("wait", &wait_for_message, "timeout_ns"_a)
      .def("source", &source_of);

  nb::class_<PyMailbox>(module, "Mailbox", nb::is_weak_referenceable())
      .def(
          "__init__",
          [](PyMailbox* self, nb::object communicator) {
            try {
              new (self) PyMailbox(communicator);
            } catch (const Failure& failure) {
              raise_failure(*nb::inst_ptr<Communicator>(communicator), failure);
            } catch (const UsageError& error) {
              raise("UsageError", error.what());
            }
          },
          "communicator"_a)
      .def("send", &post_send, "peer"_a, "context"_a, "tag"_a, "address"_a, "nbytes"_a)
      .def("receive", &post_receive, "peer"_a, "context"_a, "tag"_a, "address"_a, "nbytes"_a,
           "peers"_a = std::vector<int>())
      .def(
          "cancel",
          [](PyMailbox& self, uint64_t context, const std::string& reason) {
            const ReleaseGil released;
            self.mailbox().cancel(context, reason);
          },
          "context"_a, "reason"_a)
      .def(
          "close",
          [](PyMailbox& self, const std::string& reason) {
            const ReleaseGil released;
            self.mailbox().close(reason);
          },
          "reason"_a)
      .def("abandon", &abandon_for_good<PyMailbox>);
}

}  // namespace ronde
