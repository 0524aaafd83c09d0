// All-gather of blocks of different sizes.
//
// Large blocks travel along a *ring*: in step s, rank r sends block r - s to the next rank and receives block r - 1 - s
// from the previous one. Every rank has two neighbours only and forwards each segment of a block while the rest of the
// block is still arriving. Small blocks, and all blocks between two ranks, take a direct *exchange*: every rank sends
// its block to every other, in one step. Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
// Operations in MPICH", IJHPCA 19(1), 2005, section on all-gather.
#include <cstring>
#include <vector>

#include "algorithms/chunks.h"
#include "algorithms/over_links.h"

namespace ronde {
namespace {

constexpr size_t kExchangeBytes = 64 << 10;

void exchange(const Group& group, const Call& call, std::byte* out, const Chunks& blocks) {
  const int rank = group.rank();
  std::vector<Transfer> transfers;
  for (int step = 1; step < group.size(); ++step) {
    const int to = (rank + step) % group.size();
    const int from = (rank - step + group.size()) % group.size();
    transfers.push_back(group.send(to, call, out + blocks[rank].begin, blocks[rank].count));
    transfers.push_back(group.recv(from, call, out + blocks[from].begin, blocks[from].count));
  }
  group.wait(transfers);
}

void ring(const Group& group, const Call& call, std::byte* out, const Chunks& blocks, size_t segment_bytes) {
  const int rank = group.rank();
  const int size = group.size();
  const int next = (rank + 1) % size;
  const int previous = (rank - 1 + size) % size;

  struct Arrival {
    Range range;
    bool forward;  // the next rank needs it, too: true for every block but the next rank's own
    Transfer transfer;
  };
  std::vector<Arrival> arrivals;
  for (int step = 0; step < size - 1; ++step) {
    const int block = (rank - 1 - step + size) % size;
    for (const Range& range : blocks.segments(block, segment_bytes)) {
      arrivals.push_back({range, block != next, group.recv(previous, call, out + range.begin, range.count)});
    }
  }
  Transfer last;
  for (const Range& range : blocks.segments(rank, segment_bytes)) {
    last = group.send(next, call, out + range.begin, range.count);
  }
  for (const Arrival& arrival : arrivals) {
    group.wait(arrival.transfer);
    if (arrival.forward) last = group.send(next, call, out + arrival.range.begin, arrival.range.count);
  }
  group.wait(last);
}

}  // namespace

void allgatherv(const Group& group, const Call& call, const void* in, void* out, std::span<const size_t> sizes,
                size_t segment_bytes) {
  const Chunks blocks = Chunks::of(sizes);
  std::byte* all = static_cast<std::byte*>(out);
  const Range own = blocks[group.rank()];
  if (own.count > 0 && all + own.begin != in) std::memcpy(all + own.begin, in, own.count);
  if (blocks.total() <= kExchangeBytes || group.size() <= 2) return exchange(group, call, all, blocks);
  ring(group, call, all, blocks, segment_bytes);
}

}  // namespace ronde
