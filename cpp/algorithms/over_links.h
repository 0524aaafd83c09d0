// Collectives over links: between hosts, or between ranks that share no memory.
//
// The common rules:
//   - Every rank of the group calls the same function with the same arguments, except for the buffers and its own
//     sizes. `call` is the same on all ranks and travels with every message; every receiver compares it with its own. A
//     reduction combines call.count elements of the types in `reduction`, which differ from the call's type when the
//     group is one stage of several. Input and result have the same type where `in` may be `out`.
//   - Functions without a reduction measure their data in bytes.
//   - Any number of ranks >= 1, any size >= 0. Buffers must not overlap unless the function allows it.
//   - Roots, and the entries of spans, are numbered like the members of the group.
//   - `segment_bytes` bounds one message of a pipeline. It changes speed and memory, never a result. All ranks must
//     pass the same value, at least 16 bytes.
//   - They throw Failure and MismatchError. Afterwards the links still refer to the buffers: close them without calling
//     progress() again.
#pragma once

#include <cstddef>
#include <span>

#include "algorithms/chunks.h"
#include "base/function_ref.h"
#include "base/scratch.h"
#include "base/types.h"
#include "communicator/call.h"
#include "host/group.h"
#include "kernels/reduction.h"

namespace ronde {

inline constexpr size_t kSegmentBytes = 256 << 10;
// Up to this size a root gets all contributions to a reduction itself.
inline constexpr size_t kOneStepBytes = 16 << 10;

// out[i] = in[i] of rank 0 (op) in[i] of rank 1 (op) ..., on every rank; `in` may be `out`. All ranks get bitwise the
// same result.
//
// direct: two steps for any number of ranks, in rank order, with one rounding. The result is bitwise reproducible: it
// does not depend on segments, nor on an element's place in the buffer. For mid and large sizes, and for 16-bit floats.
void allreduce_direct(const Group& group, const Call& call, const void* in, void* out, const Reduction& reduction,
                      Scratch& scratch, size_t segment_bytes = kSegmentBytes);
// ring: every rank communicates with its two neighbours only. The order of a sum depends on the element's place in the
// buffer. Partial results travel in reduction.dtype, which must have room for them (partial_type()) and which is also
// the type of the result.
void allreduce_ring(const Group& group, const Call& call, const void* in, void* out, const Reduction& reduction,
                    Scratch& scratch, size_t segment_bytes = kSegmentBytes);
// doubling: log2(ranks) steps with the whole buffer, and as much scratch. For small buffers. Types as for the ring.
void allreduce_doubling(const Group& group, const Call& call, const void* in, void* out, const Reduction& reduction,
                        Scratch& scratch);

// The result of allreduce_direct, on the root only; the other ranks ignore `out`. `in` may be `out`. All ranks must
// pass the same `one_step_bytes`; several groups that share the links of their hosts also share kOneStepBytes.
void reduce_to_root(const Group& group, const Call& call, const void* in, void* out, int root,
                    const Reduction& reduction, Scratch& scratch, size_t segment_bytes = kSegmentBytes,
                    size_t one_step_bytes = kOneStepBytes);

// Cuts the result of allreduce_direct into counts[0], counts[1], ... elements, call.count in all; rank r gets piece r.
// `out` may be this rank's piece of `in`.
void reduce_scatterv(const Group& group, const Call& call, const void* in, std::span<const size_t> counts, void* out,
                     const Reduction& reduction, Scratch& scratch, size_t segment_bytes = kSegmentBytes);

// `out` = `in` of rank 0 (sizes[0] bytes), `in` of rank 1, ...; `in` may be this rank's block of `out`.
void allgatherv(const Group& group, const Call& call, const void* in, void* out, std::span<const size_t> sizes,
                size_t segment_bytes = kSegmentBytes);

// Copies `data` of the root to `data` of all ranks. `arrived` is called for each segment, in order, when this rank has
// it and has begun to send it on.
void broadcast(
    const Group& group, const Call& call, void* data, size_t bytes, int root, size_t segment_bytes = kSegmentBytes,
    FunctionRef<void(const Range&)> arrived = [](const Range&) {});

// The result of allgatherv, on the root only; the other ranks ignore `out`.
void gatherv(const Group& group, const Call& call, const void* in, void* out, std::span<const size_t> sizes, int root);

// The root's `in` = `out` of rank 0 (sizes[0] bytes), `out` of rank 1, ...; the other ranks ignore `in`. `out` may be
// the root's block of `in`.
void scatterv(const Group& group, const Call& call, const void* in, void* out, std::span<const size_t> sizes, int root);

// `in` = pieces for rank 0 (in_sizes[0] bytes), rank 1, ...; `out` = pieces from rank 0 (out_sizes[0] bytes), ...
void alltoallv(const Group& group, const Call& call, const void* in, std::span<const size_t> in_sizes, void* out,
               std::span<const size_t> out_sizes);

// Returns after every rank has called it.
void barrier(const Group& group, const Call& call);

}  // namespace ronde
