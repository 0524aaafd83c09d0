// Counts what collectives move: runs the algorithms of the data plane with a thread per rank, on up to 8 hosts with 64
// ranks each, and counts bytes and messages between the hosts and cache lines inside them (cores.h).
//
//   traffic_test TABLE          compares the counts with the table (tests/unit/bench/counted_traffic.txt)
//   traffic_test TABLE --write  writes the table
//
// A line of the table has, after the case: the bytes that all hosts send to others; the bytes that the busiest host
// sends or receives; the messages of the busiest rank to and from other hosts; the lines that move inside the busiest
// host, for data and for announcements and counters. tests/unit/bench/test_counted_traffic.py compares it with the
// model of cost.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "algorithms/hierarchical.h"
#include "algorithms/over_links.h"
#include "check.h"
#include "host/host_group.h"
#include "host/host_segment.h"
#include "links/shm_link.h"
#include "traffic/cores.h"
#include "traffic/counted_link.h"

using namespace ronde;
using namespace ronde::testing;

namespace {

constexpr size_t kStagingBytes = 256 << 10;       // the default
constexpr size_t kSymmetricBytes = 5 << 20;       // of each rank
constexpr size_t kArraysBytes = size_t{4} << 30;  // of a host, reserved

constexpr char kHeader[] = "hosts ranks operation bytes memory sent_bytes busiest_bytes messages data_lines slot_lines";

struct Shape {
  int hosts, ranks_per_host;
};

struct Case {
  Shape shape;
  std::string operation;
  size_t bytes;  // of a rank's array; in an all-gather and a gather, of all ranks' together
  bool is_symmetric;

  size_t count() const { return bytes / sizeof(float); }
};

std::shared_ptr<Mapping> shared_memory(size_t bytes) {
  const int fd = memfd_create("traffic", MFD_CLOEXEC);
  CHECK(ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  return std::make_shared<Mapping>(fd, bytes);
}

// All hosts and their ranks, and what connects them.
class Machines {
 public:
  explicit Machines(Shape shape) : shape_(shape), hosts_(shape.hosts), ranks_(size()) {
    for (int host = 0; host < shape.hosts; ++host) make_host(host);
    for (int rank = 0; rank < size(); ++rank) make_rank(rank);
  }

  int size() const { return shape_.hosts * shape_.ranks_per_host; }
  // One call on all ranks, and its line of the table.
  std::string run(const Case& test);

 private:
  struct Host {
    HostMemory memory;
    std::unique_ptr<HostSegment> segment;
    std::shared_ptr<Mapping> symmetric_memory;
    std::vector<int> ranks;
  };
  struct Rank {
    Endpoint endpoint;
    FailureState failure;
    SymmetricSegments symmetric;
    uint32_t segment = 0;
    std::unique_ptr<Waiter> waiter;
    std::unique_ptr<HostGroup> group;
    std::unique_ptr<Mesh> mesh;
  };

  Host& host_of(int rank) { return hosts_[static_cast<size_t>(rank / shape_.ranks_per_host)]; }
  int local(int rank) const { return rank % shape_.ranks_per_host; }
  void make_host(int number);
  void make_rank(int rank);
  Channel& channel(int from, int to);
  void call(const Case& test, int rank);
  void call_once(const Case& test);

  Shape shape_;
  std::deque<Host> hosts_;
  std::deque<Rank> ranks_;
  std::vector<std::unique_ptr<Channel>> channels_;
  uint64_t calls_ = 0;
};

void Machines::make_host(int number) {
  Host& host = hosts_[static_cast<size_t>(number)];
  const int ranks = shape_.ranks_per_host;
  for (int local = 0; local < ranks; ++local) host.ranks.push_back(number * ranks + local);
  const size_t bytes = HostSegment::bytes(ranks, kStagingBytes);
  const auto memory = shared_memory(bytes);
  host.segment = std::make_unique<HostSegment>(memory, ranks, kStagingBytes);
  std::byte *const lanes = host.segment->lane(0, 0, 0), *const pipes =
                                                            reinterpret_cast<std::byte*>(host.segment->pipe(0, 0));
  host.memory.slots.cover(memory->data(), static_cast<size_t>(lanes - memory->data()));
  host.memory.slot_stride = host.memory.slots.offset_of(lanes) / static_cast<size_t>(ranks);
  host.memory.lanes.cover(lanes, static_cast<size_t>(pipes - lanes));
  host.memory.pipes.cover(pipes, bytes - static_cast<size_t>(pipes - memory->data()));
  host.symmetric_memory = shared_memory(kSymmetricBytes * static_cast<size_t>(ranks));
  host.memory.symmetric.cover(host.symmetric_memory->data(), host.symmetric_memory->bytes());
  host.memory.reserve_arrays(kArraysBytes);
}

void Machines::make_rank(int rank) {
  Rank& mine = ranks_[static_cast<size_t>(rank)];
  Host& host = host_of(rank);
  std::vector<BellHandle> bells;
  for (int local = 0; local < shape_.ranks_per_host; ++local) bells.emplace_back(&host.segment->slot(local).bell);
  mine.endpoint.host = &host.memory;
  mine.endpoint.core = local(rank);
  mine.endpoint.bell = bells[static_cast<size_t>(local(rank))];
  mine.segment = mine.symmetric.add(host.symmetric_memory, kSymmetricBytes, local(rank));
  mine.waiter = std::make_unique<Waiter>(mine.endpoint.bell, mine.failure, WaitPolicy{.spins = 2, .yields = 2});
  mine.group = std::make_unique<HostGroup>(*host.segment, mine.symmetric, host.ranks, local(rank), bells, *mine.waiter);
  std::vector<std::unique_ptr<Link>> links(static_cast<size_t>(size()));
  for (int other = 0; other < size(); ++other) {
    if (other == rank) continue;
    if (&host_of(other) == &host) {
      links[static_cast<size_t>(other)] = std::make_unique<ShmLink>(
          other, rank, "host", host.segment->pipe(local(rank), local(other)),
          host.segment->pipe(local(other), local(rank)), bells[static_cast<size_t>(local(other))]);
    } else {
      links[static_cast<size_t>(other)] = std::make_unique<CountedLink>(channel(rank, other), channel(other, rank));
    }
  }
  mine.mesh = std::make_unique<Mesh>(rank, std::move(links), *mine.waiter, false);
}

Channel& Machines::channel(int from, int to) {
  const auto ranks = static_cast<size_t>(size());
  channels_.resize(ranks * ranks);
  std::unique_ptr<Channel>& channel = channels_[static_cast<size_t>(from) * ranks + static_cast<size_t>(to)];
  if (!channel) {
    channel =
        std::make_unique<Channel>(ranks_[static_cast<size_t>(from)].endpoint, ranks_[static_cast<size_t>(to)].endpoint);
  }
  return *channel;
}

// As the communicator makes the call (communicator.cc).
void Machines::call(const Case& test, int rank) {
  Rank& mine = ranks_[static_cast<size_t>(rank)];
  HostMemory& memory = host_of(rank).memory;
  HostGroup& group = *mine.group;
  Mesh& mesh = *mine.mesh;
  const auto ranks = static_cast<size_t>(size());
  const OnCore on_core(memory, local(rank));
  size_t used = 0;
  const auto array = [&](size_t bytes) {
    if (!test.is_symmetric) return memory.allocate(bytes);
    std::byte* const begin = mine.symmetric.own_part(mine.segment) + used;
    used += (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
    CHECK(used <= kSymmetricBytes);
    return begin;
  };

  const bool is_one_host = shape_.hosts == 1, is_by_hosts = shape_.ranks_per_host > 1;
  Scratch scratch, partials;
  std::vector<std::vector<int>> ranks_of_host;
  for (const Host& host : hosts_) ranks_of_host.push_back(host.ranks);
  Hierarchy hierarchy{group, mesh, ranks_of_host, rank / shape_.ranks_per_host, scratch, partials, size(), {}};
  const size_t part = test.count() / ranks;
  const std::vector<size_t> counts(ranks, part), sizes(ranks, part * sizeof(float));
  std::vector<size_t> offsets(ranks);
  std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), size_t{0});
  const Parts parts{sizes, offsets};

  Call call{.sequence = calls_, .count = test.count(), .root = 0, .kind = Kind::kAllreduce, .dtype = DType::kFloat32};
  const Reduction sum{DType::kFloat32, ReduceOp::kSum, 1};
  const bool gathers = test.operation == "allgather" || test.operation == "gather";
  std::byte* const in = array(gathers ? sizes[0] : test.bytes);
  if (!is_one_host && is_by_hosts) group.announce(call);
  if (test.operation == "allreduce") {
    const auto algorithm = select_allreduce(Algorithm::kAuto, {}, test.bytes, sum.dtype, sum.op, size(), shape_.hosts);
    if (algorithm == Algorithm::kInHost) return group.allreduce(call, sum, in, in, call.count);
    if (algorithm == Algorithm::kHierarchical) return hierarchical_allreduce(hierarchy, call, in, in);
    if (algorithm == Algorithm::kDirect) return allreduce_direct(mesh, call, in, in, sum, scratch);
    if (algorithm == Algorithm::kRing) return allreduce_ring(mesh, call, in, in, sum, scratch);
    return allreduce_doubling(mesh, call, in, in, sum, scratch);
  }
  if (test.operation == "reduce") {
    if (is_one_host) return group.reduce(call, sum, in, in, call.count, 0);
    if (is_by_hosts) return hierarchical_reduce(hierarchy, call, in, in);
    return reduce_to_root(mesh, call, in, in, 0, sum, scratch);
  }
  if (test.operation == "broadcast") return hierarchical_broadcast(hierarchy, call, in);
  std::byte* const out = array(test.operation == "alltoall" || gathers ? test.bytes : sizes[0]);
  if (test.operation == "reducescatter") {
    if (is_one_host) return group.reduce_scatter(call, sum, in, counts, out);
    if (is_by_hosts) return hierarchical_reduce_scatter(hierarchy, call, in, counts, out);
    return reduce_scatterv(mesh, call, in, counts, out, sum, scratch);
  }
  if (test.operation == "allgather") {
    if (is_one_host) return group.share(call, in, out, parts);
    if (is_by_hosts) return hierarchical_allgather(hierarchy, call, in, out, sizes);
    return allgatherv(mesh, call, in, out, sizes);
  }
  if (test.operation == "gather") {
    return is_one_host ? group.share(call, in, out, parts, 0) : gatherv(mesh, call, in, out, sizes, 0);
  }
  if (test.operation == "alltoall") {
    return is_one_host ? group.deal(call, in, parts, out, parts) : alltoallv(mesh, call, in, sizes, out, sizes);
  }
  CHECK(test.operation == "scatter");
  if (!is_one_host) return scatterv(mesh, call, in, out, sizes, 0);
  const std::vector<size_t> nothing(ranks);
  std::vector<size_t> arriving(ranks);
  arriving[0] = sizes[0];
  group.deal(call, in, {rank == 0 ? sizes : nothing, offsets}, out, {arriving, nothing});
}

void Machines::call_once(const Case& test) {
  for (Host& host : hosts_) {
    host.memory.free_arrays();
    host.memory.flush();
    host.memory.slot_lines = host.memory.data_lines = 0;
  }
  for (Rank& rank : ranks_) rank.endpoint.sent_bytes = rank.endpoint.received_bytes = rank.endpoint.messages = 0;
  ++calls_;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size(); ++rank) threads.emplace_back([&, rank] { call(test, rank); });
  for (std::thread& thread : threads) thread.join();
}

std::string Machines::run(const Case& test) {
  for (int warm_up = 0; warm_up < 2; ++warm_up) call_once(test);  // brings lanes and slots of both parities into caches
  call_once(test);
  uint64_t sent = 0, busiest = 0, messages = 0, data_lines = 0, slot_lines = 0;
  for (Host& host : hosts_) {
    uint64_t out = 0, into = 0;
    for (int rank : host.ranks) {
      const Endpoint& endpoint = ranks_[static_cast<size_t>(rank)].endpoint;
      out += endpoint.sent_bytes;
      into += endpoint.received_bytes;
      messages = std::max(messages, endpoint.messages.load());
    }
    sent += out;
    busiest = std::max({busiest, out, into});
    data_lines = std::max<uint64_t>(data_lines, host.memory.data_lines + host.memory.flush());
    slot_lines = std::max<uint64_t>(slot_lines, host.memory.slot_lines);
  }
  std::ostringstream line;
  line << test.shape.hosts << ' ' << test.shape.ranks_per_host << ' ' << test.operation << ' ' << test.bytes << ' '
       << (test.is_symmetric ? "symmetric" : "private") << ' ' << sent << ' ' << busiest << ' ' << messages << ' '
       << data_lines << ' ' << slot_lines;
  return line.str();
}

// Between hosts only reductions and broadcasts access symmetric memory.
bool knows_symmetric(const Case& test) {
  return test.shape.hosts == 1 ||
         (test.shape.ranks_per_host > 1 &&
          (test.operation.find("reduce") != test.operation.npos || test.operation == "broadcast"));
}

std::vector<Case> cases_of(Shape shape) {
  std::vector<size_t> sizes = {2 << 10, 32 << 10, 256 << 10};
  if (shape.hosts * shape.ranks_per_host > 64) sizes = {256 << 10};  // for a line of each rank
  if (shape.hosts == 2) sizes = {4 << 20};                           // for pieces (hierarchical_pieces.h)
  std::vector<Case> cases;
  for (const char* operation :
       {"allreduce", "reduce", "reducescatter", "broadcast", "allgather", "gather", "scatter", "alltoall"}) {
    for (const size_t bytes : sizes) {
      for (const bool is_symmetric : {false, true}) {
        const Case test{shape, operation, bytes, is_symmetric};
        if (!is_symmetric || knows_symmetric(test)) cases.push_back(test);
      }
    }
  }
  return cases;
}

// The numbers at the end of a line.
std::vector<double> counts_of(const std::string& line) {
  std::istringstream words(line);
  std::string word;
  for (int skipped = 0; skipped < 5; ++skipped) words >> word;
  return {std::istream_iterator<double>(words), {}};
}

// Bytes and messages must be equal. The pipes of a host decide by the moment how many pieces a message has, and a
// waiting rank looks at lines of announcements more or less often.
bool agree(const std::string& expected, const std::string& counted) {
  const std::vector<double> a = counts_of(expected), b = counts_of(counted);
  if (a.size() != 5 || b.size() != 5 || !std::equal(a.begin(), a.begin() + 3, b.begin())) return false;
  return std::abs(a[3] - b[3]) <= 0.02 * a[3] && b[4] <= 4 * a[4] + 100;
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc >= 2);
  const bool writes = argc > 2 && std::strcmp(argv[2], "--write") == 0;
  std::ifstream table(argv[1]);
  std::vector<std::string> lines = {kHeader};
  for (const Shape shape :
       {Shape{1, 2}, Shape{1, 8}, Shape{1, 64}, Shape{2, 4}, Shape{8, 1}, Shape{8, 8}, Shape{8, 64}}) {
    Machines machines(shape);
    for (const Case& test : cases_of(shape)) lines.push_back(machines.run(test));
  }
  if (writes) {
    std::ofstream written(argv[1]);
    for (const std::string& line : lines) written << line << '\n';
    return 0;
  }
  int failures = 0;
  std::string expected;
  for (const std::string& line : lines) {
    std::getline(table, expected);
    if (line == expected || agree(expected, line)) continue;
    std::fprintf(stderr, "expected %s\n counted %s\n", expected.c_str(), line.c_str());
    ++failures;
  }
  if (failures > 0) std::fprintf(stderr, "If the new counts are right: traffic_test %s --write\n", argv[1]);
  return failures > 0;
}
