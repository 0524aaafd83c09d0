// Barrier by dissemination.
//
// In step s, rank r notifies rank r + 2^s that it and all ranks it has notifications of have arrived, and waits for the
// same notification from rank r - 2^s. After log2(ranks) steps, rounded up, every rank has notice of every other.
// Hensgen, Finkel, Manber, "Two Algorithms for Barrier Synchronization", International Journal of Parallel Programming
// 17(1), 1988.
#include "algorithms/over_links.h"

namespace ronde {

void barrier(const Group& group, const Call& call) {
  const int rank = group.rank();
  const int size = group.size();
  for (int distance = 1; distance < size; distance *= 2) {
    const Transfer transfers[] = {group.send((rank + distance) % size, call, nullptr, 0),
                                  group.recv((rank - distance + size) % size, call, nullptr, 0)};
    group.wait(transfers);
  }
}

}  // namespace ronde
