// All-to-all by pairwise exchange.
//
// In step s, rank r sends to rank r + s and receives from rank r - s, so in every step each rank has exactly one sender
// and one receiver. Only a few steps are in flight at once, so that many ranks do not flood one. Thakur, Rabenseifner,
// Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005, section on all-to-all.
#include <array>
#include <cstring>

#include "algorithms/chunks.h"
#include "algorithms/over_links.h"

namespace ronde {
namespace {

constexpr int kStepsUnderWay = 4;

}  // namespace

void alltoallv(const Group& group, const Call& call, const void* in, std::span<const size_t> in_sizes, void* out,
               std::span<const size_t> out_sizes) {
  const int rank = group.rank();
  const int size = group.size();
  const Chunks outgoing = Chunks::of(in_sizes);
  const Chunks incoming = Chunks::of(out_sizes);
  const std::byte* from_all = static_cast<const std::byte*>(in);
  std::byte* to_all = static_cast<std::byte*>(out);

  std::array<std::array<Transfer, 2>, kStepsUnderWay> steps;
  for (int step = 1; step < size; ++step) {
    auto& transfers = steps[step % kStepsUnderWay];
    group.wait(transfers);
    const int to = (rank + step) % size;
    const int from = (rank - step + size) % size;
    transfers = {group.send(to, call, from_all + outgoing[to].begin, outgoing[to].count),
                 group.recv(from, call, to_all + incoming[from].begin, incoming[from].count)};
  }
  const Range own = outgoing[rank];
  if (own.count > 0) std::memcpy(to_all + incoming[rank].begin, from_all + own.begin, own.count);
  for (const auto& transfers : steps) group.wait(transfers);
}

}  // namespace ronde
