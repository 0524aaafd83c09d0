// All-reduce by recursive doubling.
//
// In step s the ranks whose numbers differ in bit s exchange their partial results and combine them: after log2(ranks)
// steps every rank has the result. Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
// MPICH", IJHPCA 19(1), 2005, section on all-reduce. If the number of ranks is not a power of two, some ranks are
// *folded* first: among the first 2 * extra ranks, each even rank sends its elements to the odd rank above it and
// receives the result at the end. The remaining ranks are renumbered.
//
// Both partners combine in the same order, the lower block of ranks first. So both compute the same bits, and by
// induction all ranks have bitwise the same result, in the order of a fixed tree over the ranks.
#include <bit>

#include "algorithms/over_links.h"
#include "kernels/reduce.h"

namespace ronde {

void allreduce_doubling(const Group& group, const Call& call, const void* in, void* out, const Reduction& reduction,
                        Scratch& scratch) {
  if (group.size() == 1) return reduce(reduction, out, &in, 1, call.count);
  const int rank = group.rank();
  const int players = static_cast<int>(std::bit_floor(static_cast<unsigned>(group.size())));
  const int extra = group.size() - players;
  const size_t bytes = call.count * reduction.item_bytes();
  std::byte* received = scratch.get(bytes);

  const auto combine = [&](const void* lower, const void* upper, bool last) {
    const void* sources[] = {lower, upper};
    reduce(last ? reduction : part_of(reduction), out, sources, 2, call.count);
  };

  const bool folded = rank < 2 * extra;
  if (folded && rank % 2 == 0) {
    const Transfer transfers[] = {group.send(rank + 1, call, in, bytes), group.recv(rank + 1, call, out, bytes)};
    return group.wait(transfers);
  }
  const void* mine = in;
  if (folded) {
    group.wait(group.recv(rank - 1, call, received, bytes));
    combine(received, in, false);
    mine = out;
  }

  const int player = folded ? rank / 2 : rank - extra;
  for (int distance = 1; distance < players; distance *= 2) {
    const int partner = player ^ distance;
    const int partner_rank = partner < extra ? 2 * partner + 1 : partner + extra;
    // The send must end, too, before `out` changes.
    const Transfer transfers[] = {group.send(partner_rank, call, mine, bytes),
                                  group.recv(partner_rank, call, received, bytes)};
    group.wait(transfers);
    const bool last = 2 * distance == players;
    if (player < partner) {
      combine(mine, received, last);
    } else {
      combine(received, mine, last);
    }
    mine = out;
  }
  if (folded) group.wait(group.send(rank - 1, call, out, bytes));
}

}  // namespace ronde
