// Reduce to one root, in rank order.
//
// Large buffers: every rank reduces the chunk it owns and sends the result to the root (Rabenseifner's reduce:
// reduce-scatter, then gather), so that the root receives about twice the buffer instead of one buffer per rank. Small
// buffers, and two ranks: the root owns all chunks, which takes one step. Thakur, Rabenseifner, Gropp, "Optimization of
// Collective Communication Operations in MPICH", IJHPCA 19(1), 2005, section on reduce.
#include <vector>

#include "algorithms/direct.h"

namespace ronde {

Chunks owners_of_reduction(size_t count, int size, int root, bool is_one_step) {
  if (size > 2 && !is_one_step) return Chunks::even(count, size);
  std::vector<size_t> counts(static_cast<size_t>(size), 0);
  counts[static_cast<size_t>(root)] = count;
  return Chunks::of(counts);
}

void reduce_to_root(const Group& group, const Call& call, const void* in, void* out, int root,
                    const Reduction& reduction, Scratch& scratch, size_t segment_bytes, size_t one_step_bytes) {
  const bool is_one_step = call.count * reduction.item_bytes() <= one_step_bytes;
  const Chunks chunks = owners_of_reduction(call.count, group.size(), root, is_one_step);
  Results results{.receiver = root, .own = nullptr, .all = nullptr};
  if (group.rank() == root) {
    results.all = static_cast<std::byte*>(out);
    results.own = results.all + chunks[root].begin * reduction.result_bytes();
  }
  reduce_by_owners(group, call, chunks, in, results, reduction, scratch, segment_bytes);
}

}  // namespace ronde
