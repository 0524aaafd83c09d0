// Direct gather and scatter with a size per rank.
//
// Every rank sends its block to the root, or receives it from there. The root serves all ranks at once. A tree would
// save the root messages, but the blocks would travel several times.
#include <cstring>
#include <vector>

#include "algorithms/chunks.h"
#include "algorithms/over_links.h"

namespace ronde {

void gatherv(const Group& group, const Call& call, const void* in, void* out, std::span<const size_t> sizes, int root) {
  const Chunks blocks = Chunks::of(sizes);
  if (group.rank() != root) return group.wait(group.send(root, call, in, blocks[group.rank()].count));
  std::byte* all = static_cast<std::byte*>(out);
  std::vector<Transfer> transfers;
  for (int rank = 0; rank < group.size(); ++rank) {
    const Range block = blocks[rank];
    if (rank != root) {
      transfers.push_back(group.recv(rank, call, all + block.begin, block.count));
    } else if (block.count > 0 && all + block.begin != in) {
      std::memcpy(all + block.begin, in, block.count);
    }
  }
  group.wait(transfers);
}

void scatterv(const Group& group, const Call& call, const void* in, void* out, std::span<const size_t> sizes,
              int root) {
  const Chunks blocks = Chunks::of(sizes);
  if (group.rank() != root) return group.wait(group.recv(root, call, out, blocks[group.rank()].count));
  const std::byte* all = static_cast<const std::byte*>(in);
  std::vector<Transfer> transfers;
  for (int rank = 0; rank < group.size(); ++rank) {
    const Range block = blocks[rank];
    if (rank != root) {
      transfers.push_back(group.send(rank, call, all + block.begin, block.count));
    } else if (block.count > 0 && all + block.begin != out) {
      std::memcpy(out, all + block.begin, block.count);
    }
  }
  group.wait(transfers);
}

}  // namespace ronde
