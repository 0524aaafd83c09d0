// Each piece takes all steps of its operation, those inside the host and the one along the rails. The step along the
// rails only starts transfers; the steps inside the host drive them (HostGroup::Driving), so that the links do not
// idle. That they drive them is necessary, too: a rank that waited for its host alone could keep back what another host
// needs to go on. Every rank takes the steps of all pieces in one order.
//
// Results do not depend on the pieces: sums are formed in rank order inside a host, then in host order.
#include "algorithms/hierarchical_pieces.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "algorithms/direct.h"

namespace ronde {
namespace {

constexpr size_t kDepth = DirectReduction::kDepth;
// Pieces whose results may be on their way while others are shared.
constexpr size_t kLag = DirectReduction::kMostLag;
// A piece is in its slot until the wait for it has returned.
constexpr size_t kSlots = kDepth + kLag + 1;
// A piece that is smaller waits longer for the ranks of its host than it saves.
constexpr size_t kSmallestPieceBytes = 256 << 10;
constexpr size_t kSmallestSegmentBytes = 32 << 10;
constexpr size_t kFewestPieces = 16;

size_t host_count(const Hierarchy& hierarchy) { return hierarchy.ranks_of_host.size(); }

// The steps of a reduction along the rails: starts piece s, finishes piece s - depth, and calls finished() with the
// number of a piece whose results are there.
template <class Start, class Finished>
void reduce_pieces(DirectReduction* direct, size_t pieces, Start&& start, Finished&& finished) {
  for (size_t step = 0; step < pieces + kDepth + kLag; ++step) {
    if (direct != nullptr && step >= kDepth && step < pieces + kDepth) direct->finish(step - kDepth);
    if (step < pieces) start(step);
    if (step < kDepth + kLag) continue;
    if (direct != nullptr) direct->wait(step - kDepth - kLag);
    finished(step - kDepth - kLag);
  }
  if (direct != nullptr) direct->wait_for_all();
}

// Elements, a multiple of what the rails share.
size_t piece_elements(const Hierarchy& hierarchy, const Call& call, size_t pieces) {
  const size_t unit = kShardAlignment * static_cast<size_t>(rail_count(hierarchy));
  return (call.count + pieces * unit - 1) / (pieces * unit) * unit;
}

// An all-reduce, or a reduction to call.root: reduce-scatter inside each host, direct reduction of each shard along its
// rail, and inside the hosts with a result an all-gather or a gather.
class ReductionInPieces {
 public:
  // `root_host`: the host of call.root; -1 for an all-reduce.
  ReductionInPieces(Hierarchy& hierarchy, const Call& call, const void* in, void* out, size_t pieces, int root_host)
      : hierarchy_(hierarchy),
        call_(call),
        in_(static_cast<const std::byte*>(in)),
        out_(static_cast<std::byte*>(out)),
        pieces_(pieces),
        has_root_(root_host >= 0),
        root_host_(root_host),
        item_(size_of(call.dtype)),
        piece_count_(piece_elements(hierarchy, call, pieces)),
        inside_(inside_host(call)) {
    const size_t longest = shards_of_piece(0).counts[0];
    // A shard's sums lie where its result will be if they have its type and the result belongs there.
    sum_bytes_ = has_root_ || inside_.result != call.dtype ? longest * inside_.result_bytes() : 0;
    shard_bytes_ = has_root_ ? longest * item_ : 0;
    slots_ = hierarchy.partials.get(kSlots * (sum_bytes_ + shard_bytes_));
    if (!is_on_rail(hierarchy)) return;
    members_ = rail(hierarchy, hierarchy.host.index());
    const Chunks chunks = owners(longest);
    const size_t segment = std::max(chunks[0].count, chunks[std::max(root_host_, 0)].count);
    direct_.emplace(Group(hierarchy.mesh, members_), call, across_hosts(hierarchy, call),
                    has_root_ ? root_host_ : kAllRanks, hierarchy.scratch, segment);
  }

  void run() {
    const HostGroup::Driving driving(hierarchy_.host, hierarchy_.mesh);
    reduce_pieces(
        direct_ ? &*direct_ : nullptr, pieces_, [&](size_t piece) { start(piece); },
        [&](size_t piece) { share(piece); });
  }

 private:
  Shards shards_of_piece(size_t piece) const {
    return shards_of(hierarchy_, item_, std::min(piece_count_, call_.count - piece * piece_count_));
  }

  // The part of a shard that each host reduces.
  Chunks owners(size_t count) const {
    const auto hosts = static_cast<int>(host_count(hierarchy_));
    return has_root_ ? owners_of_reduction(count, hosts, root_host_) : Chunks::even(count, hosts);
  }

  std::byte* slot(size_t piece) const { return slots_ + piece % kSlots * (sum_bytes_ + shard_bytes_); }
  std::byte* shard(size_t piece, const Shards& shards) const {
    if (has_root_) return slot(piece) + sum_bytes_;
    return out_ + piece * piece_count_ * item_ + shards.offsets[static_cast<size_t>(hierarchy_.host.index())];
  }

  void start(size_t piece) {
    const Shards shards = shards_of_piece(piece);
    std::byte* const result = shard(piece, shards);
    std::byte* const sums = sum_bytes_ == 0 ? result : slot(piece);
    hierarchy_.host.reduce_scatter(call_, inside_, in_ + piece * piece_count_ * item_, shards.counts, sums);
    if (!direct_) return;
    const Chunks chunks = owners(shards.counts[static_cast<size_t>(hierarchy_.host.index())]);
    const bool has_result = !has_root_ || hierarchy_.my_host == root_host_;
    Tick tick{sums, has_result ? result + chunks[hierarchy_.my_host].begin * item_ : nullptr, result, {}};
    for (int host = 0; host < static_cast<int>(host_count(hierarchy_)); ++host) {
      const bool is_owner = chunks[host].count > 0 || !has_root_ || host == root_host_;
      tick.segments.push_back(is_owner ? std::optional(chunks[host]) : std::nullopt);
    }
    direct_->start(piece, std::move(tick));
  }

  void share(size_t piece) {
    if (has_root_ && hierarchy_.my_host != root_host_) return;
    const Shards shards = shards_of_piece(piece);
    const std::vector<int>& mine = hierarchy_.ranks_of_host[static_cast<size_t>(hierarchy_.my_host)];
    const int reader = has_root_ ? position(mine, call_.root) : -1;
    hierarchy_.host.share(call_, shard(piece, shards), out_ + piece * piece_count_ * item_,
                          {shards.sizes, shards.offsets}, reader);
  }

  Hierarchy& hierarchy_;
  const Call& call_;
  const std::byte* const in_;
  std::byte* const out_;
  const size_t pieces_;
  const bool has_root_;
  const int root_host_;
  const size_t item_;
  const size_t piece_count_;  // elements of a piece, except for the last one
  const Reduction inside_;
  size_t sum_bytes_;
  size_t shard_bytes_;
  std::byte* slots_;
  std::vector<int> members_;
  std::optional<DirectReduction> direct_;  // nothing: this rank is on no rail
};

}  // namespace

size_t segment_bytes_for(const Hierarchy& hierarchy, size_t largest) {
  const size_t hosts = host_count(hierarchy);
  const size_t parts = hosts * static_cast<size_t>(rail_count(hierarchy));
  // A multiple of all sizes of elements.
  const size_t smallest = std::max(kSmallestSegmentBytes, (kSmallestPieceBytes / parts + kLine - 1) / kLine * kLine);
  if (largest < kFewestPieces * smallest) return 0;
  const size_t fair_bytes = kDirectScratchBytes / (kDepth * hosts) / kLine * kLine;
  const size_t most = std::max(smallest, std::min(kSegmentBytes, fair_bytes));
  return std::clamp(largest / kFewestPieces / kLine * kLine, smallest, most);
}

size_t piece_count(const Hierarchy& hierarchy, const Call& call) {
  const size_t parts = host_count(hierarchy) * static_cast<size_t>(rail_count(hierarchy));
  const size_t part_bytes = call.count / parts * inside_host(call).result_bytes();
  const size_t segment_bytes = segment_bytes_for(hierarchy, part_bytes);
  if (segment_bytes == 0) return 0;
  const size_t each = piece_elements(hierarchy, call, (part_bytes + segment_bytes - 1) / segment_bytes);
  return (call.count + each - 1) / each;  // rounding may save some
}

void allreduce_in_pieces(Hierarchy& hierarchy, const Call& call, const void* in, void* out, size_t pieces) {
  ReductionInPieces(hierarchy, call, in, out, pieces, -1).run();
}

void reduce_in_pieces(Hierarchy& hierarchy, const Call& call, const void* in, void* out, size_t pieces) {
  ReductionInPieces(hierarchy, call, in, out, pieces, host_of(hierarchy, call.root)).run();
}

// Piece t has segment t of every rank's part. Host by host, the ranks of this host sum what the ranks of that host get.
void reduce_scatter_in_pieces(Hierarchy& hierarchy, const Call& call, const void* in, std::span<const size_t> counts,
                              void* out, size_t segment_bytes) {
  const Reduction inside = inside_host(call);
  const size_t hosts = host_count(hierarchy);
  const std::vector<int> members = rail(hierarchy, hierarchy.host.index());
  const Chunks chunks = Chunks::of(counts);
  const size_t segment = segment_bytes / inside.result_bytes();  // elements
  const size_t largest = *std::max_element(counts.begin(), counts.end());
  std::byte* const sums = hierarchy.partials.get(kSlots * hosts * segment_bytes);

  DirectReduction direct(Group(hierarchy.mesh, members), call, across_hosts(hierarchy, call), kNoRank,
                         hierarchy.scratch, segment);
  const auto start = [&](size_t piece) {
    std::byte* const own = static_cast<std::byte*>(out) + piece * segment * size_of(call.dtype);
    Tick tick{sums + piece % kSlots * hosts * segment_bytes, own, nullptr, {}};
    for (size_t host = 0; host < hosts; ++host) {
      std::vector<size_t> segments, offsets;
      for (int rank : hierarchy.ranks_of_host[host]) {
        const Range range = chunks.segment(rank, piece, segment);
        segments.push_back(range.count);
        offsets.push_back(range.begin);
      }
      std::byte* const sum = sums + (piece % kSlots * hosts + host) * segment_bytes;
      hierarchy.host.reduce_scatter(call, inside, in, segments, offsets, sum);
      const size_t count = segments[static_cast<size_t>(hierarchy.host.index())];
      const bool has_segment = count > 0 || piece == 0;  // the first message of each rank tells its call
      tick.segments.push_back(has_segment ? std::optional(Range{host * segment, count}) : std::nullopt);
    }
    direct.start(piece, std::move(tick));
  };
  const HostGroup::Driving driving(hierarchy.host, hierarchy.mesh);
  reduce_pieces(&direct, (largest + segment - 1) / segment, start, [](size_t) {});
}

// The blocks of a rail travel along a ring of its ranks, segment by segment, and the ranks of a host share the segments
// that they have received. All of them receive the blocks of the other hosts in the same order.
void allgather_in_pieces(Hierarchy& hierarchy, const Call& call, const void* in, void* out,
                         std::span<const size_t> sizes, size_t segment_bytes) {
  HostGroup& host = hierarchy.host;
  const auto index = static_cast<size_t>(host.index());
  const auto hosts = static_cast<int>(host_count(hierarchy));
  const std::vector<int> members = rail(hierarchy, host.index());
  const Group group(hierarchy.mesh, members);
  const int next = (hierarchy.my_host + 1) % hosts, previous = (hierarchy.my_host + hosts - 1) % hosts;
  const Chunks blocks = Chunks::of(sizes);
  auto* const all = static_cast<std::byte*>(out);

  const auto own = blocks[members[static_cast<size_t>(hierarchy.my_host)]];
  move_bytes(all + own.begin, static_cast<const std::byte*>(in), own.count);
  Transfer last;
  for (const Range& range : blocks.segments(members[static_cast<size_t>(hierarchy.my_host)], segment_bytes)) {
    last = group.send(next, call, all + range.begin, range.count);
  }
  const auto block_at = [&](int step) { return static_cast<size_t>((hierarchy.my_host + hosts - step) % hosts); };
  std::vector<std::vector<Transfer>> arrivals(static_cast<size_t>(hosts));
  for (int step = 1; step < hosts; ++step) {
    for (const Range& range : blocks.segments(members[block_at(step)], segment_bytes)) {
      arrivals[static_cast<size_t>(step)].push_back(group.recv(previous, call, all + range.begin, range.count));
    }
  }

  const HostGroup::Driving driving(host, hierarchy.mesh);
  for (int step = 0; step < hosts; ++step) {
    const std::vector<int>& ranks = hierarchy.ranks_of_host[block_at(step)];
    const auto& mine = arrivals[static_cast<size_t>(step)];
    size_t largest = 0;
    for (int rank : ranks) largest = std::max(largest, sizes[static_cast<size_t>(rank)]);
    const size_t pieces = std::max<size_t>((largest + segment_bytes - 1) / segment_bytes, 1);
    for (size_t piece = 0; piece < pieces; ++piece) {
      std::vector<size_t> bytes, offsets;
      for (int rank : ranks) {
        const Range range = blocks.segment(rank, piece, segment_bytes);
        bytes.push_back(range.count);
        offsets.push_back(range.begin);
      }
      if (piece < mine.size()) {
        group.wait(mine[piece]);
        if (step < hosts - 1) last = group.send(next, call, all + offsets[index], bytes[index]);
      }
      host.share(call, all + offsets[index], all, {bytes, offsets});
    }
  }
  group.wait(last);
}

}  // namespace ronde
