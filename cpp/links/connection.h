// A connected socket and, between hosts, the keys of its messages.
#pragma once

#include <optional>
#include <utility>

#include "links/sealer.h"
#include "system/descriptor.h"

namespace ronde {

struct Connection {
  Connection() = default;
  Connection(Descriptor socket, std::optional<ConnectionKeys> keys = std::nullopt)
      : socket(std::move(socket)), keys(keys) {}

  Descriptor socket;
  std::optional<ConnectionKeys> keys;  // none within a host, where only the kernel carries the messages
};

}  // namespace ronde
