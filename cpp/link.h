// A link: a reliable channel between this rank and one peer, whatever carries it.
//
// The two rules:
//   1. Messages are FIFO per direction. The k-th send() here meets the k-th recv() there, and both know the size.
//   2. Nothing blocks. send() and recv() only queue; progress() moves what can be moved right now.
//
// Every message travels behind a frame that repeats the sender's Call and the payload's size. The receiver compares it
// with its own before it accepts a single payload byte, and throws MismatchError if they differ.
// One thread at a time uses a link; the communicator's lock sees to that.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "call.h"

namespace ronde {

// Position of a message in its direction's queue, counted from 1: done once sent() (or received()) reaches it.
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
  virtual Ticket received() const = 0;  // messages whose bytes have all arrived

  // Moves what can be moved without blocking. True if anything moved. Throws Failure(kPeerLost) when the peer's end is
  // closed or broken, MismatchError when a frame does not fit.
  virtual bool progress() = 0;

  // True while a send or receive is unfinished.
  virtual bool pending() const = 0;

  // In a forked child: closes what it has open, and touches nothing that may have been changing at the fork.
  virtual void abandon() {}

  // What to poll(2) for before progress() can move anything. Links in shared memory add nothing: they ring the
  // sleeper's bell (bell.h) instead.
  virtual void add_poll(std::vector<pollfd>& fds) const = 0;
};

}  // namespace ronde
