// What travels before every payload on a link, and how a link names its peer in errors.
//
// The frame is written as it lies in memory: little endian, as every machine we build for. A receiver copies it out of
// reach of the sender, checks it here, and only then accepts the first byte of the payload.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "aead.h"
#include "call.h"
#include "error.h"

namespace ronde {

struct Frame {
  // "RONDE", a zero byte, and the version of the wire format in the last two bytes.
  static constexpr uint64_t kMagic = 0x0002'0045'444e'4f52;

  uint64_t magic = kMagic;
  Call call;
  uint64_t bytes = 0;  // of the payload that follows
};
static_assert(sizeof(Frame) == 48);

// A frame as it travels between hosts: encrypted perhaps, and with its tag.
using SealedFrame = std::array<std::byte, sizeof(Frame) + kTagBytes>;

// Both ends of a link, for its checks and its errors.
struct Ends {
  int peer;
  int own;
  std::string peer_host;

  std::string peer_name() const { return "rank " + std::to_string(peer) + " on " + peer_host; }
  Failure lost(const std::string& what) const { return Failure(FailureKind::kPeerLost, peer, peer_name() + what); }

  // Throws MismatchError if the frame announces another call or size than `expected`, Failure(kPeerLost) if it is no
  // frame at all.
  void check(const Frame& frame, const Frame& expected) const;
};

}  // namespace ronde
