// Reduce to one root, in rank order.
//
// Large buffers: every rank reduces the chunk it owns and sends the result to the root (Rabenseifner's reduce:
// reduce-scatter, then gather), so that the root receives about twice the buffer instead of one buffer per rank. Small
// buffers, and two ranks: the root owns all chunks, which takes one step. Thakur, Rabenseifner, Gropp, "Optimization of
// Collective Communication Operations in MPICH", IJHPCA 19(1), 2005, section on reduce.
#include <vector>

#include "algorithms/direct.h"

namespace ronde {
namespace {

Chunks owners(size_t count, size_t element_bytes, int size, int root, size_t one_step_bytes) {
  if (size > 2 && count * element_bytes > one_step_bytes) return Chunks::even(count, size);
  std::vector<size_t> counts(size, 0);
  counts[root] = count;
  return Chunks::of(counts);
}

}  // namespace

void reduce_to_root(const Group& group, const Call& call, const void* in, void* out, int root,
                    const Reduction& reduction, Scratch& scratch, size_t segment_bytes, size_t one_step_bytes) {
  const Chunks chunks = owners(call.count, reduction.item_bytes(), group.size(), root, one_step_bytes);
  Results results{.receiver = root, .own = nullptr, .all = nullptr};
  if (group.rank() == root) {
    results.all = static_cast<std::byte*>(out);
    results.own = results.all + chunks[root].begin * reduction.result_bytes();
  }
  reduce_by_owners(group, call, chunks, in, results, reduction, scratch, segment_bytes);
}

}  // namespace ronde
