// The Python bindings of connections (Wire), of the connections that all communicators of a process share
// (SharedConnections), of a new communicator's watch (JoinedWatch), and of connections whose messages Python sends and
// receives (SealedConnection).
#include "binding/connections.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "binding/border.h"
#include "binding/keys.h"
#include "waiting/waits.h"

namespace ronde {

void set_keys(Connection& connection, const Wire& wire) {
  const auto& [fd, outgoing, incoming, conceals] = wire;
  if (outgoing.size() == 0) return;
  ConnectionKeys keys{.conceals = conceals};
  if (!read_key(outgoing.ptr(), keys.outgoing) || !read_key(incoming.ptr(), keys.incoming)) {
    throw std::invalid_argument("a connection needs two keys of 32 bytes");
  }
  connection.keys = keys;
}

Watch& JoinedWatch::watch() const {
  if (!watch_) raise("UsageError", "this communicator is already connected or given up");
  return *watch_;
}

void JoinedWatch::time_out(const std::vector<int>& missing, const std::string& reason) const {
  watch().announce_failure(Failure(FailureKind::kTimeout, -1, reason, missing));
}

void JoinedWatch::lose(int rank, const std::string& reason) const {
  watch().announce_failure(Failure(FailureKind::kPeerLost, rank, reason));
}

std::unique_ptr<Watch> JoinedWatch::take_watch() {
  static_cast<void>(watch());
  return std::move(watch_);
}

template <class Body>
auto JoinedWatch::guarded(Body&& body) const {
  try {
    const ReleaseGil released;
    return body();
  } catch (const Failure& failure) {
    raise_failure(failure, failure.rank >= 0 ? hosts_[static_cast<size_t>(failure.rank)] : "");
  }
}

namespace {

std::map<int, Connection> take_connections(const std::map<int, Wire>& controls) {
  std::map<int, Connection> connections;  // first takes all descriptors, which closes them if anything fails
  for (const auto& [process, wire] : controls) connections.emplace(process, Descriptor(std::get<int>(wire)));
  for (const auto& [process, wire] : controls) set_keys(connections.at(process), wire);
  return connections;
}

std::unique_ptr<SharedConnections> share_connections(const std::map<int, Wire>& controls) {
  return std::make_unique<SharedConnections>(take_connections(controls));
}

void add_connections(SharedConnections& self, const std::map<int, Wire>& controls) {
  std::map<int, Connection> connections = take_connections(controls);
  try {
    const ReleaseGil released;  // the thread calls members with the lock that this needs
    self.add(std::move(connections));
  } catch (const UsageError& error) {
    raise("UsageError", error.what());
  }
}

std::unique_ptr<SealedConnection> seal_connection(const nb::bytes& outgoing, const nb::bytes& incoming, bool conceals) {
  ConnectionKeys keys{.conceals = conceals};
  if (!read_key(outgoing.ptr(), keys.outgoing) || !read_key(incoming.ptr(), keys.incoming)) {
    throw std::invalid_argument("a connection needs two keys of 32 bytes");
  }
  return std::make_unique<SealedConnection>(keys);
}

// Returns the next message with its tag behind it.
nb::bytes seal_message(SealedConnection& self, const nb::bytes& message, size_t clear_bytes) {
  if (clear_bytes > message.size()) throw std::invalid_argument("the readable part is longer than the message");
  std::string sealed(message.size() + kTagBytes, '\0');
  std::memcpy(sealed.data(), message.c_str(), message.size());
  self.seal(std::as_writable_bytes(std::span(sealed)), clear_bytes);
  return nb::bytes(sealed.data(), sealed.size());
}

// Returns the message without its tag, or nothing if it is not the next message.
std::optional<nb::bytes> open_message(SealedConnection& self, const nb::bytes& sealed, size_t clear_bytes) {
  std::string message(sealed.c_str(), sealed.size());
  if (!self.open(std::as_writable_bytes(std::span(message)), clear_bytes)) return std::nullopt;
  return nb::bytes(message.data(), message.size() - kTagBytes);
}

}  // namespace

JoinedWatch::JoinedWatch(std::shared_ptr<SharedConnections> connections, const std::string& name, int rank,
                         std::vector<std::string> hosts, std::vector<int> processes)
    : hosts_(std::move(hosts)) {
  std::vector<std::string> names;
  for (const std::string& host : hosts_) names.push_back("rank " + std::to_string(names.size()) + " on " + host);
  try {
    watch_ =
        std::make_unique<Watch>(rank, std::move(names), std::move(connections), hash_of(name), std::move(processes));
  } catch (const UsageError& error) {
    raise("UsageError", error.what());
  }
}

void bind_connections(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<SharedConnections>(module, "SharedConnections")
      .def(nb::new_(&share_connections), "controls"_a)
      .def("add", &add_connections, "controls"_a)
      .def("set_bell",
           [](SharedConnections& self, int process, int bell) { self.set_bell(process, Descriptor(bell)); });

  nb::class_<JoinedWatch>(module, "JoinedWatch")
      .def(nb::init<std::shared_ptr<SharedConnections>, const std::string&, int, std::vector<std::string>,
                    std::vector<int>>(),
           "connections"_a, "name"_a, "rank"_a, "hosts"_a, "processes"_a)
      .def("check",
           [](const JoinedWatch& self) {
             Watch& watch = self.watch();
             self.guarded([&] { watch.failure().check(); });
           })
      .def("send_descriptor", [](const JoinedWatch& self, int rank, int fd) { self.watch().send_descriptor(rank, fd); })
      .def("receive_descriptor",
           [](const JoinedWatch& self, int rank, int64_t timeout_ns) {
             Watch& watch = self.watch();
             return self.guarded([&] { return watch.receive_descriptor(rank, timeout_ns); });
           })
      .def("time_out", &JoinedWatch::time_out, "missing"_a, "reason"_a)
      .def("lose", &JoinedWatch::lose, "rank"_a, "reason"_a)
      .def("give_up", &JoinedWatch::give_up);

  nb::class_<SealedConnection>(module, "SealedConnection")
      .def(nb::new_(&seal_connection), "outgoing"_a, "incoming"_a, "conceals"_a)
      .def("seal", &seal_message)
      .def("open", &open_message);
}

}  // namespace ronde
