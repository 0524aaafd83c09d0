// The tree of hosts along which leaders talk: host 0 at the top, up to `arity` hosts under each, filled level by level.
// src/ronde/core/tree.py says the same.
#pragma once

#include <algorithm>
#include <cstddef>

namespace ronde {

struct Tree {
  size_t hosts;
  size_t arity;

  // Not of host 0, which has none.
  size_t parent(size_t host) const { return (host - 1) / arity; }
  // The hosts right under this one are first_child() to first_child() + child_count() - 1.
  size_t first_child(size_t host) const { return std::min(host * arity + 1, hosts); }
  size_t child_count(size_t host) const { return std::min(host * arity + 1 + arity, hosts) - first_child(host); }
};

}  // namespace ronde
