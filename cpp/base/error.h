// The errors of the data plane. The border translates them to Python's (binding/module.cc).
//
// A Failure is *sticky*: once a communicator has one, every pending and later call on it throws the same one. A
// UsageError concerns one call on one rank. A MismatchError is either (see Communicator): recoverable if every rank
// finds the disagreement before any byte moves, sticky if a link finds it.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ronde {

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct MismatchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class FailureKind : int {
  kNone = 0,
  kPeerLost = 1,  // `rank` died, left, or cannot be reached
  kAborted = 2,   // `rank` called abort()
  kMismatch = 3,  // `rank` made a different call
  kTimeout = 4,   // waited longer than the setting allows
};

struct Failure : std::runtime_error {
  Failure(FailureKind kind, int rank, const std::string& reason, std::vector<int> missing = {})
      : std::runtime_error(reason), kind(kind), rank(rank), missing(std::move(missing)) {}
  FailureKind kind;
  int rank;                  // the culprit's rank in this communicator; -1 if none is known
  std::vector<int> missing;  // of a time-out on this rank: the ranks it waited for
};

// A peer sent something that no rank of this version sends. `what` names it and continues "rank 3 on host sent".
struct ProtocolError : std::runtime_error {
  ProtocolError(int peer, const std::string& what) : std::runtime_error(what), peer(peer) {}
  int peer;
};

// A signal handler of the program raised an exception while this rank waited; usually for Ctrl-C.
struct Interrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace ronde
