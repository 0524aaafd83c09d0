// Fixed keys for both ends of a test's connection.
#pragma once

#include "links/sealer.h"

namespace ronde::testing {

inline ConnectionKeys keys_of_end(int end, bool conceals = false) {
  ConnectionKeys keys{.conceals = conceals};
  keys.outgoing.fill(static_cast<std::byte>(1 + end));
  keys.incoming.fill(static_cast<std::byte>(2 - end));
  return keys;
}

}  // namespace ronde::testing
