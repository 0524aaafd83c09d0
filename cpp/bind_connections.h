// How connections come from Python, where they are opened (ronde/comm/bootstrap.py).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "connection.h"
#include "shared_connections.h"
#include "watch.h"

namespace nb = nanobind;

namespace ronde {

// The descriptor of a connection and its keys, as comm/bootstrap.py has them: outgoing, incoming, and whether it
// conceals. Two empty keys: it has none.
using Wire = std::tuple<int, nb::bytes, nb::bytes, bool>;

// Gives a connection the keys of a wire, if it has any; not its descriptor.
void set_keys(Connection& connection, const Wire& wire);

// The watch of a communicator that is being made: its ranks' messages and descriptors arrive from here on.
class JoinedWatch {
 public:
  // `name`: alike on all ranks, and used once. `processes`: by rank, as the connections number them.
  JoinedWatch(std::shared_ptr<SharedConnections> connections, const std::string& name, int rank,
              std::vector<std::string> hosts, std::vector<int> processes);

  // All raise UsageError after take() and give_up().
  Watch& watch() const;
  std::unique_ptr<Watch> take();
  // The communicator does not come about: the other ranks hear of it.
  void give_up() { watch_.reset(); }

  // Without the interpreter's lock; raises a Failure as the exception that it is.
  template <class Body>
  auto guarded(Body&& body) const;

 private:
  std::vector<std::string> hosts_;
  std::unique_ptr<Watch> watch_;
};

}  // namespace ronde
