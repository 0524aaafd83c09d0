// The tree of hosts along which leaders exchange notes: host 0 is the root, each host has up to `arity` children, and
// levels fill one after the other. src/ronde/engine/merging.py defines the same tree.
#pragma once

#include <algorithm>
#include <cstddef>

namespace ronde {

struct Tree {
  size_t hosts;
  size_t arity;

  // Host 0 has no parent.
  size_t parent(size_t host) const { return (host - 1) / arity; }
  // A host's children are first_child() to first_child() + child_count() - 1.
  size_t first_child(size_t host) const { return std::min(host * arity + 1, hosts); }
  size_t child_count(size_t host) const { return std::min(host * arity + 1 + arity, hosts) - first_child(host); }
};

}  // namespace ronde
