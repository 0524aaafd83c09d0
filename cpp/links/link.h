// A link: a reliable channel between this rank and one peer, over shared memory or sockets.
//
// The two rules:
//   1. Messages are FIFO per direction. The k-th send() here matches the k-th recv() there, and both know the size.
//   2. Nothing blocks. send() and recv() only queue; progress() moves the bytes that can move now.
//
// Before every message travels a frame with the sender's Call and the payload's size. The receiver compares it with its
// own before it accepts the first payload byte, and throws MismatchError if they differ. The communicator's lock
// ensures that one thread at a time uses a link.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "communicator/call.h"

namespace ronde {

// The position of a message in its direction's queue, counted from 1. The message is done once sent() (or received())
// reaches it.
using Ticket = uint64_t;

class Link {
 public:
  virtual ~Link() = default;
  Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // The bytes must stay valid, and for send() unchanged, until the ticket is done. `call` is copied.
  virtual Ticket send(const Call& call, const void* data, size_t bytes) = 0;
  virtual Ticket recv(const Call& call, void* data, size_t bytes) = 0;

  virtual Ticket sent() const = 0;      // messages whose bytes may be reused
  virtual Ticket received() const = 0;  // messages that have arrived completely

  // Moves as many bytes as possible without blocking. Returns true if any moved. Receives only from descriptors that
  // poll(2) has reported, see take_poll(). Throws Failure(kPeerLost) if the peer's end is closed or broken,
  // MismatchError if a frame does not match.
  virtual bool progress() = 0;

  // True while a send or receive is unfinished.
  virtual bool pending() const = 0;

  // Whether the peer's messages end with an end of file, at which progress() throws. If so, they may arrive after the
  // peer's goodbye, which takes another connection. If not, they have all arrived by then.
  virtual bool has_end_of_file() const = 0;

  // For a forked child: closes the link's descriptors and touches nothing that may have been changing at the fork.
  virtual void abandon() {}

  // Adds the descriptors to poll(2) until progress() can move bytes. Links in shared memory add none: they ring the
  // sleeper's bell (bell.h).
  virtual void add_poll(std::vector<pollfd>&) const {}
  // Takes what poll(2) has found out about these descriptors, which begin `fds`. Returns their number.
  virtual size_t take_poll(std::span<const pollfd>) { return 0; }
};

}  // namespace ronde
