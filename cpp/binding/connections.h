// Connections as Python passes them, which opens them (ronde/comm/bootstrap.py).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "failures/shared_connections.h"
#include "failures/watch.h"
#include "links/connection.h"

namespace nb = nanobind;

namespace ronde {

// A connection's descriptor, outgoing key, incoming key, and whether it conceals. Two empty keys: it has none.
using Wire = std::tuple<int, nb::bytes, nb::bytes, bool>;

// Gives a connection the keys of a wire, if there are any, but not the descriptor.
void set_keys(Connection& connection, const Wire& wire);

// The watch of a communicator under construction. It already receives messages and descriptors of the other ranks.
class JoinedWatch {
 public:
  // `name`: equal on all ranks, and used once. `processes`: by rank, in the connections' numbering.
  JoinedWatch(std::shared_ptr<SharedConnections> connections, const std::string& name, int rank,
              std::vector<std::string> hosts, std::vector<int> processes);

  // watch() and take_watch() raise UsageError after take_watch() and give_up().
  Watch& watch() const;
  std::unique_ptr<Watch> take_watch();
  // Gives up the construction, which fails it on the other ranks.
  void give_up() { watch_.reset(); }
  // Fails the construction on the other ranks, because these ranks are missing: it names them, and not this rank.
  void time_out(const std::vector<int>& missing, const std::string& reason) const;
  // Fails the construction on the other ranks, because this rank is lost.
  void lose(int rank, const std::string& reason) const;

  // Runs `body` without the interpreter's lock, and raises a Failure as its Python exception.
  template <class Body>
  auto guarded(Body&& body) const;

 private:
  std::vector<std::string> hosts_;
  std::unique_ptr<Watch> watch_;
};

}  // namespace ronde
