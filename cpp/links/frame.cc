#include "links/frame.h"

namespace ronde {

void Ends::check(const Frame& frame, const Frame& expected) const {
  if (frame.magic != Frame::kMagic) {
    throw lost(" sent something that is not a message of this version of Ronde: do all ranks run the same version?");
  }
  if (frame.call != expected.call) throw MismatchError(describe_mismatch(peer, frame.call, own, expected.call));
  if (frame.bytes != expected.bytes) {
    throw MismatchError("rank " + std::to_string(peer) + " sends " + std::to_string(frame.bytes) + " bytes, but rank " +
                        std::to_string(own) + " expects " + std::to_string(expected.bytes) + " bytes, in " +
                        expected.call.describe());
  }
}

}  // namespace ronde
