// Collectives over links: between hosts, or wherever ranks share no memory.
//
// The common rules:
//   - Every rank of the group calls the same function with the same arguments, buffers and own sizes aside. `call`, the
//     same on all ranks, goes with every message and is checked by every receiver. What is combined is call.count
//     elements, as `reduction` says: in types that are not the call's when the group is one stage of several. Types of
//     input and result are the same where `in` may be `out`.
//   - What is only moved is measured in bytes.
//   - Any number of ranks >= 1, any size >= 0. Buffers must not overlap unless it says so.
//   - Roots, and the entries of spans, are numbered as the members of the group are.
//   - `segment_bytes` bounds one message of a pipeline. It changes speed and memory, never a result; all ranks must
//     pass the same value, at least 16.
//   - They throw Failure and MismatchError. After that the links still refer to the buffers: drive them no more, close
//     them.
#pragma once

#include <cstddef>
#include <span>

#include "call.h"
#include "group.h"
#include "reduction.h"
#include "scratch.h"
#include "types.h"

namespace ronde {

inline constexpr size_t kSegmentBytes = 256 << 10;

// out[i] = in[i] of rank 0 (op) in[i] of rank 1 (op) ..., on every rank; `in` may be `out`. All ranks get bitwise the
// same result.
//
// direct: two steps whatever the number of ranks, rank order, one rounding: bitwise reproducible, whatever the
// segments and whatever else shares the buffer. For large and mid sizes, and for 16-bit floats.
void allreduce_direct(const Group& group, const Call& call, const void* in, void* out, const Reduction& reduction,
                      Scratch& scratch, size_t segment_bytes = kSegmentBytes);
// ring: every rank talks to its two neighbours only; the order of a sum depends on where in the buffer an element lies.
// Passes partial results on in reduction.dtype, which must have room for them (partial_type()), and which is also the
// type of the result.
void allreduce_ring(const Group& group, const Call& call, const void* in, void* out, const Reduction& reduction,
                    Scratch& scratch, size_t segment_bytes = kSegmentBytes);
// doubling: log2(ranks) steps with the whole buffer (and as much scratch): for small ones. Types as for the ring.
void allreduce_doubling(const Group& group, const Call& call, const void* in, void* out, const Reduction& reduction,
                        Scratch& scratch);

// The result of allreduce_direct, on the root only; elsewhere `out` is not used. `in` may be `out`.
void reduce_to_root(const Group& group, const Call& call, const void* in, void* out, int root,
                    const Reduction& reduction, Scratch& scratch, size_t segment_bytes = kSegmentBytes);

// Cuts the result of allreduce_direct into counts[0], counts[1], ... elements, call.count in all; rank r gets piece r.
// `out` may be the place of the own piece in `in`.
void reduce_scatterv(const Group& group, const Call& call, const void* in, std::span<const size_t> counts, void* out,
                     const Reduction& reduction, Scratch& scratch, size_t segment_bytes = kSegmentBytes);

// out = in of rank 0 (sizes[0] bytes), in of rank 1, ...; `in` may be its own place in `out`.
void allgatherv(const Group& group, const Call& call, const void* in, void* out, std::span<const size_t> sizes,
                size_t segment_bytes = kSegmentBytes);

// `data` of the root to everybody's `data`.
void broadcast(const Group& group, const Call& call, void* data, size_t bytes, int root,
               size_t segment_bytes = kSegmentBytes);

// As allgatherv, on the root only; elsewhere `out` is not used.
void gatherv(const Group& group, const Call& call, const void* in, void* out, std::span<const size_t> sizes, int root);

// The root's `in` = out of rank 0 (sizes[0] bytes), out of rank 1, ...; elsewhere `in` is not used. `out` may be its
// own place in `in`.
void scatterv(const Group& group, const Call& call, const void* in, void* out, std::span<const size_t> sizes, int root);

// `in` = pieces for rank 0 (in_sizes[0] bytes), rank 1, ...; `out` = pieces from rank 0 (out_sizes[0] bytes), ...
void alltoallv(const Group& group, const Call& call, const void* in, std::span<const size_t> in_sizes, void* out,
               std::span<const size_t> out_sizes);

// Returns when every rank has called it.
void barrier(const Group& group, const Call& call);

}  // namespace ronde
