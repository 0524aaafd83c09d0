// Broadcast along a binomial tree, or a chain.
//
// Ranks count from the root. In the tree, rank r's *parent* is r without its lowest set bit; its *children* are r with
// one bit added below that. So the root sends log2(ranks) times, first to the child with the largest subtree, and after
// log2(ranks) steps every rank has the data. The data travels in segments: a rank forwards each to its children while
// the next one arrives. Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
// IJHPCA 19(1), 2005, section on broadcast.
//
// The tree's root sends large data log2(ranks) times over one link. Such data travels along a chain instead, each rank
// sends it once, and the last one waits for as many more segments as ranks lie in between. That takes no longer than
// the tree from as many segments on.
#include <bit>
#include <vector>

#include "algorithms/chunks.h"
#include "algorithms/over_links.h"

namespace ronde {

void broadcast(const Group& group, const Call& call, void* data, size_t bytes, int root, size_t segment_bytes,
               FunctionRef<void(const Range&)> arrived) {
  const int size = group.size();
  const unsigned place = static_cast<unsigned>((group.rank() - root + size) % size);
  const unsigned lowest_bit = place == 0 ? std::bit_ceil(static_cast<unsigned>(size)) : place & -place;
  const auto rank_at = [&](unsigned from_root) { return static_cast<int>((from_root + root) % size); };

  const bool is_chain = size > 2 && bytes >= static_cast<size_t>(size - 2) * segment_bytes;
  std::vector<int> children;
  for (unsigned bit = is_chain ? 1 : lowest_bit / 2; bit > 0; bit /= 2) {
    if (place + bit < static_cast<unsigned>(size)) children.push_back(rank_at(place + bit));
  }
  std::byte* bytes_of = static_cast<std::byte*>(data);
  const std::vector<Range> segments = Chunks::even(bytes, 1).segments(0, segment_bytes);
  std::vector<Transfer> arrivals(segments.size());
  if (place != 0) {
    const int parent = rank_at(is_chain ? place - 1 : place - lowest_bit);
    for (size_t i = 0; i < segments.size(); ++i) {
      arrivals[i] = group.recv(parent, call, bytes_of + segments[i].begin, segments[i].count);
    }
  }
  std::vector<Transfer> last(children.size());
  for (size_t i = 0; i < segments.size(); ++i) {
    group.wait(arrivals[i]);
    for (size_t child = 0; child < children.size(); ++child) {
      last[child] = group.send(children[child], call, bytes_of + segments[i].begin, segments[i].count);
    }
    arrived(segments[i]);
  }
  group.wait(last);
}

}  // namespace ronde
