// The frame that precedes every payload on a link, and the names of a link's peers in errors.
//
// The frame travels in its memory layout: little endian, like every supported machine. A receiver copies it to memory
// that the sender cannot change, checks it here, and only then accepts the first byte of the payload.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "communicator/call.h"
#include "links/aead.h"

namespace ronde {

struct Frame {
  // "RONDE", a zero byte, and the version of the wire format in the last two bytes.
  static constexpr uint64_t kMagic = 0x0002'0045'444e'4f52;

  uint64_t magic = kMagic;
  Call call;
  uint64_t bytes = 0;  // of the payload that follows
};
static_assert(sizeof(Frame) == 48);

// A frame between hosts: with its tag, and encrypted if the connection conceals.
using SealedFrame = std::array<std::byte, sizeof(Frame) + kTagBytes>;

// Both ends of a link, for its checks and its errors.
struct Ends {
  int peer;
  int own;
  std::string peer_host;

  std::string peer_name() const { return "rank " + std::to_string(peer) + " on " + peer_host; }
  Failure lost(const std::string& what) const { return Failure(FailureKind::kPeerLost, peer, peer_name() + what); }

  // Throws MismatchError if the frame announces another call or size than `expected`, Failure(kPeerLost) if it is not a
  // frame.
  void check(const Frame& frame, const Frame& expected) const;
};

}  // namespace ronde
