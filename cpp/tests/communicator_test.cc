// Whole communicators with threads as ranks: one host, several hosts, failures. Compares every operation with plain
// loops.
#include "communicator/communicator.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <latch>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "rank_communicators.h"

namespace ronde {
namespace {

using namespace testing;

using Values = std::vector<float>;
using View = std::span<const float>;

constexpr size_t kCounts[] = {0, 1, 5, 6, 7, 1000, 4096, 4097, 70'001, 600'000};
constexpr int kMaxSize = 4;
constexpr size_t kMaxCount = 600'000 + 3 * kMaxSize;

// What ranks pass and expect, computed once: under ThreadSanitizer that takes longer than the calls that are tested.
struct Tables {
  std::vector<Values> inputs;                          // of each rank
  std::vector<Values> sums{Values(kMaxCount)}, means;  // of the first n ranks; of the first n + 1

  Tables() {
    for (size_t rank = 0; rank < kMaxSize; ++rank) {
      Values& input = inputs.emplace_back(kMaxCount);
      Values &sum = sums.emplace_back(sums.back()), &mean = means.emplace_back(kMaxCount);
      for (size_t i = 0; i < kMaxCount; ++i) {
        input[i] = static_cast<float>((i * 7 + rank * 13) % 101);
        sum[i] += input[i];
        mean[i] = sum[i] / static_cast<float>(rank + 1);
      }
    }
  }
};

const Tables& tables() {
  static const Tables all;
  return all;
}

View values(int rank, size_t count) { return View(tables().inputs[static_cast<size_t>(rank)]).first(count); }
View sum_of(int size, size_t count) { return View(tables().sums[static_cast<size_t>(size)]).first(count); }
View mean_of(int size, size_t count) { return View(tables().means[static_cast<size_t>(size) - 1]).first(count); }
Values copy_of(View view) { return {view.begin(), view.end()}; }
void append(Values& to, View more) { to.insert(to.end(), more.begin(), more.end()); }

bool same(View a, View b) {
  return a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size_bytes()));
}

void check_reductions(Communicator& comm) {
  const int size = comm.size(), rank = comm.rank();
  for (size_t count : kCounts) {
    const View mine = values(rank, count), expected = sum_of(size, count);
    Values out(count), in_place = copy_of(mine);
    comm.allreduce(mine.data(), out.data(), count, DType::kFloat32, ReduceOp::kSum);
    CHECK(same(out, expected));
    comm.allreduce(in_place.data(), in_place.data(), count, DType::kFloat32, ReduceOp::kAverage);
    CHECK(same(in_place, mean_of(size, count)));
    for (int root = 0; root < size; ++root) {
      Values at_root(rank == root ? count : 0);
      comm.reduce(mine.data(), rank == root ? at_root.data() : nullptr, count, DType::kFloat32, ReduceOp::kSum, root);
      if (rank == root) CHECK(same(at_root, expected));
    }
    std::vector<size_t> counts(size, count / static_cast<size_t>(size));
    counts[0] += count % static_cast<size_t>(size);
    const size_t begin = std::accumulate(counts.begin(), counts.begin() + rank, size_t{0});
    Values share(counts[rank]);
    comm.reduce_scatter(mine.data(), share.data(), counts, DType::kFloat32, ReduceOp::kSum);
    CHECK(same(share, expected.subspan(begin, share.size())));
  }
}

void check_exchanges(Communicator& comm) {
  const int size = comm.size(), rank = comm.rank();
  for (size_t count : kCounts) {
    std::vector<size_t> sizes;
    Values everyone;
    for (int other = 0; other < size; ++other) {
      const View part = values(other, count + static_cast<size_t>(other));
      sizes.push_back(part.size_bytes());
      append(everyone, part);
    }
    const View mine = values(rank, count + static_cast<size_t>(rank));
    Values out(everyone.size());
    comm.allgather(mine.data(), out.data(), sizes, DType::kFloat32);
    CHECK(same(out, everyone));
    for (int root = 0; root < size; ++root) {
      Values gathered(rank == root ? everyone.size() : 0);
      comm.gather(mine.data(), gathered.data(), sizes, DType::kFloat32, root);
      if (rank == root) CHECK(same(gathered, everyone));
      Values scattered(mine.size());
      comm.scatter(rank == root ? everyone.data() : nullptr, scattered.data(), sizes, DType::kFloat32, root);
      CHECK(same(scattered, mine));
      Values copy = copy_of(values(rank, count));
      comm.broadcast(copy.data(), count, DType::kFloat32, root);
      CHECK(same(copy, values(root, count)));
    }
    // Rank r sends count + r + p elements, those from its p-th on, to rank p.
    Values sending, expected;
    std::vector<size_t> in_sizes, out_sizes;
    for (int p = 0; p < size; ++p) {
      const size_t amount = count + static_cast<size_t>(rank + p);
      append(sending, values(rank, kMaxCount).subspan(static_cast<size_t>(p), amount));
      append(expected, values(p, kMaxCount).subspan(static_cast<size_t>(rank), amount));
      in_sizes.push_back(amount * sizeof(float));
      out_sizes.push_back(amount * sizeof(float));
    }
    Values received(expected.size());
    comm.alltoall(sending.data(), in_sizes, received.data(), out_sizes, DType::kFloat32);
    CHECK(same(received, expected));
    comm.barrier();
  }
  std::vector<uint64_t> numbers(static_cast<size_t>(size));
  comm.exchange(Kind::kAllgather, DType::kFloat32, -1, 1, static_cast<uint64_t>(rank) + 5, numbers);
  for (int p = 0; p < size; ++p) CHECK(numbers[p] == static_cast<uint64_t>(p) + 5);
}

void check_point_to_point(Communicator& comm) {
  const int size = comm.size(), rank = comm.rank();
  if (size == 1) return;
  for (size_t count : kCounts) {
    const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    const View mine = values(rank, count);
    Values theirs(count);
    // Large messages wait for their receiver: even ranks send first.
    for (int turn = 0; turn < 2; ++turn) {
      if ((rank % 2 == 0) == (turn == 0)) {
        if (next != rank && !(size % 2 == 1 && rank == size - 1))
          comm.send(mine.data(), count * 4, DType::kFloat32, next, 3);
      } else if (!(size % 2 == 1 && previous == size - 1)) {
        comm.recv(theirs.data(), count * 4, DType::kFloat32, previous, 3);
        CHECK(same(theirs, values(previous, count)));
      }
    }
    comm.barrier();
  }
}

void check_symmetric(Communicator& comm) {
  constexpr size_t kCount = 300'000;
  const size_t part_bytes = 2 * kCount * sizeof(float);
  static std::shared_ptr<Mapping> memory;
  if (comm.rank() == 0) memory = shared_memory(part_bytes * static_cast<size_t>(comm.size()));
  comm.barrier();
  const uint32_t number = comm.symmetric()->add(memory, part_bytes, comm.local_rank());
  auto* x = reinterpret_cast<float*>(comm.symmetric()->own_part(number));

  const View mine = values(comm.rank(), kCount), expected = sum_of(comm.size(), kCount);
  std::copy(mine.begin(), mine.end(), x);
  comm.allreduce(x, x + kCount, kCount, DType::kFloat32, ReduceOp::kSum);
  CHECK(same(expected, {x + kCount, kCount}) && same(mine, {x, kCount}));
  comm.allreduce(x, x, kCount, DType::kFloat32, ReduceOp::kSum);
  CHECK(same(expected, {x, kCount}));
  comm.broadcast(x, kCount, DType::kFloat32, 0);
  comm.barrier();
  comm.symmetric()->drop(number);
}

void check_mismatch(Communicator& comm) {
  if (comm.size() == 1) return;
  float x[4] = {};
  const size_t count = comm.rank() == 1 ? 3 : 4;
  CHECK_THROWS(comm.allreduce(x, x, count, DType::kFloat32, ReduceOp::kSum), MismatchError);
  x[0] = 1;
  comm.allreduce(x, x, 4, DType::kFloat32, ReduceOp::kSum);
  CHECK(x[0] == static_cast<float>(comm.size()));
}

// Rank 1 aborts between two calls; all others fail, whichever call they are in.
void check_abort(const std::vector<int>& host_of) {
  run(host_of, {}, [](Communicator& comm) {
    std::vector<float> x(600'000);
    try {  // the abort may come while the others are still in the first call
      comm.allreduce(x.data(), x.data(), x.size(), DType::kFloat32, ReduceOp::kSum);
      if (comm.rank() == 1) return comm.abort("enough");
      comm.allreduce(x.data(), x.data(), x.size(), DType::kFloat32, ReduceOp::kSum);
      CHECK(false);
    } catch (const Failure& failure) {
      CHECK(failure.kind == FailureKind::kAborted);
      CHECK(failure.rank == 1);
      CHECK(std::string(failure.what()).find("enough") != std::string::npos);
    }
  });
}

// Another library moves the bytes: its exception fails all ranks, and a rank that waits inside the library notices.
void check_delegate(const std::vector<int>& host_of) {
  run(host_of, {}, [](Communicator& comm) {
    Call call;
    call.kind = Kind::kBroadcast;
    call.count = 3;
    comm.delegate(call, [] {});
    try {
      comm.delegate(call, [&] {
        if (comm.rank() == 1) throw std::runtime_error("no such wire");
        while (!comm.has_failed()) std::this_thread::yield();
        throw std::runtime_error("the world has failed");
      });
      CHECK(false);
    } catch (const Failure& failure) {
      CHECK(failure.kind == FailureKind::kAborted);
      CHECK(failure.rank == 1);
      CHECK(std::string(failure.what()).find("broadcast of 3 uint8: no such wire") != std::string::npos);
    }
    CHECK_THROWS(comm.barrier(), Failure);
  });
}

void check_departure(const std::vector<int>& host_of) {
  run(host_of, {}, [](Communicator& comm) {
    try {  // a rank in the second call fails those that are still in the first
      comm.barrier();
      if (comm.rank() == 1) return;  // shuts down: says goodbye after one call
      comm.barrier();
      CHECK(false);
    } catch (const Failure& failure) {
      CHECK(failure.kind == FailureKind::kPeerLost);
      CHECK(failure.rank == 1);
    }
  });
}

// Replaces a data connection of rank 1 by a relay to rank 0: it passes the bytes on a while after rank 1 has left.
std::thread relay_late(Connection& at_0, Connection& at_1, const Watch& watch_of_0) {
  const auto [sender, incoming] = socket_pair();
  const auto [outgoing, receiver] = socket_pair();
  at_1.socket = Descriptor(sender);
  at_0.socket = Descriptor(receiver);
  return std::thread([from = Descriptor(incoming), to = Descriptor(outgoing), &watch_of_0] {
    std::vector<char> bytes(1 << 20);
    size_t end = 0;
    while (const ssize_t count = read(from.get(), bytes.data() + end, bytes.size() - end)) {
      CHECK(count > 0);
      end += static_cast<size_t>(count);
    }
    while (!watch_of_0.has_left(1)) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (size_t begin = 0; begin < end;) {
      const ssize_t count = write(to.get(), bytes.data() + begin, end - begin);
      CHECK(count > 0);
      begin += static_cast<size_t>(count);
    }
  });
}

// The goodbye takes another connection than the messages, so it may arrive first.
void check_message_before_goodbye() {
  std::vector<Wiring> wirings = wire({0, 1}, {});
  std::vector<std::thread> threads;
  for (size_t stream = 0; stream < wirings[0].data[1].size(); ++stream) {
    threads.push_back(relay_late(wirings[0].data[1][stream], wirings[1].data[0][stream], *wirings[0].watch));
  }
  const View sent = values(1, 70'001);  // on both streams
  threads.emplace_back([&] {
    Communicator comm(std::move(wirings[1]), {});
    comm.send(sent.data(), sent.size_bytes(), DType::kFloat32, 0, 7);
    comm.shutdown();
  });
  Communicator comm(std::move(wirings[0]), {});
  Values received(sent.size());
  comm.recv(received.data(), sent.size_bytes(), DType::kFloat32, 1, 7);
  CHECK(same(received, sent));
  try {
    comm.recv(received.data(), sizeof(float), DType::kFloat32, 1, 7);
    CHECK(false);
  } catch (const Failure& failure) {
    CHECK(failure.kind == FailureKind::kPeerLost);
    CHECK(failure.what() == std::string("rank 1 on host-1 closed its connection"));
  }
  for (std::thread& thread : threads) thread.join();
}

void check_timeout() {
  Options options;
  options.timeout_ns = 50'000'000;
  std::latch has_failed(1);  // until then rank 1 stays: its end would be another failure
  run({0, 0}, options, [&](Communicator& comm) {
    if (comm.rank() == 1) return has_failed.wait();
    try {
      comm.barrier();
      CHECK(false);
    } catch (const Failure& failure) {
      CHECK(failure.kind == FailureKind::kTimeout);
      CHECK(std::string(failure.what()).find("rank 1 on host-0") != std::string::npos);
    }
    has_failed.count_down();
  });
}

void check_all(const std::vector<int>& host_of, const Options& options) {
  run(host_of, options, [&host_of](Communicator& comm) {
    check_reductions(comm);
    check_exchanges(comm);
    check_point_to_point(comm);
    if (std::all_of(host_of.begin(), host_of.end(), [](int host) { return host == 0; })) check_symmetric(comm);
  });
}

// After a long receive a barrier that also takes long is not a mismatch.
void check_long_receive(const std::vector<int>& host_of) {
  constexpr auto kLong = std::chrono::milliseconds(1200);
  run(host_of, {}, [&](Communicator& comm) {
    int value = 0;
    if (comm.rank() == 0) comm.recv(&value, sizeof(value), DType::kInt32, 1, 0);
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(kLong);
      comm.send(&value, sizeof(value), DType::kInt32, 0, 0);
    }
    if (comm.rank() == 2) std::this_thread::sleep_for(2 * kLong);
    comm.barrier();
  });
}

// An array of too many axes is refused before anything is sent. A description that no rank of this version sends fails
// the communicator.
void check_axes(const std::vector<int>& host_of) {
  run(host_of, {}, [](Communicator& comm) {
    const std::vector<size_t> sizes(static_cast<size_t>(comm.size()));
    const auto begin = [&](size_t count) {
      std::vector<int64_t> words(comm.rank() == 0 ? count : 0, 1);
      comm.begin_scatter(words, nullptr, sizes, 0);
      CHECK(words.size() == count);
      comm.end_scatter(nullptr, nullptr, sizes, DType::kFloat32, 0);
    };
    if (comm.rank() == 0) CHECK_THROWS(begin(Communicator::kScatterWords + 1), UsageError);
    try {  // a rank that fails in the last call may fail another one that is still in an earlier call
      begin(Communicator::kScatterWords);
      begin(2);
      begin(1);
      comm.barrier();
      CHECK(false);
    } catch (const Failure& failure) {
      CHECK(failure.kind == FailureKind::kPeerLost && failure.rank == 0);
      const std::string expected = "rank 0 on host-0 sent a description of an array in 1 words instead of 2 to 65";
      CHECK(std::string(failure.what()).starts_with(expected));
    }
  });
}

// A thread whose collective of two calls another thread has interrupted gets an error, not what the other one has told.
void check_interrupted_steps(const std::vector<int>& host_of) {
  run(host_of, {}, [](Communicator& comm) {
    std::vector<uint64_t> rows(static_cast<size_t>(comm.size()));
    const std::vector<size_t> sizes(rows.size(), sizeof(float));
    const float one = 1;
    std::vector<float> all(rows.size());
    const auto begin = [&] { comm.begin_gather(&one, 1, 1, DType::kFloat32, -1, 0, rows); };
    const auto end = [&] { comm.end_gather(&one, all.data(), sizes, DType::kFloat32, -1); };
    begin();
    end();
    CHECK(std::all_of(all.begin(), all.end(), [](float each) { return each == 1; }));
    begin();
    std::thread other([&] {
      try {
        begin();
      } catch (const Failure&) {  // of a rank that is already further
      }
    });
    other.join();
    try {
      end();
      CHECK(false);
    } catch (const Failure& failure) {
      CHECK(failure.kind == FailureKind::kAborted);
      CHECK(std::string(failure.what()).find("another call interrupted") != std::string::npos);
    }
  });
}

}  // namespace
}  // namespace ronde

int main() {
  using namespace ronde;
  for (int size = 1; size <= 4; ++size) {
    check_all(std::vector<int>(static_cast<size_t>(size), 0), {});
    run(std::vector<int>(static_cast<size_t>(size), 0), {}, check_mismatch);
  }
  Options small_lanes;
  small_lanes.staging_bytes = 16 * 1024;
  check_all({0, 0, 0}, small_lanes);
  for (const std::vector<int>& host_of :
       {std::vector<int>{0, 1}, {0, 1, 2}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 1}}) {
    check_all(host_of, {});
    check_abort(host_of);
    check_departure(host_of);
  }
  for (Algorithm algorithm : {Algorithm::kDirect, Algorithm::kRing, Algorithm::kDoubling}) {
    Options options;
    options.allreduce = algorithm;
    check_all({0, 0, 0}, options);
    check_all({0, 0, 1, 1}, options);
  }
  for (const std::vector<int>& host_of : {std::vector<int>{0, 0, 0}, {0, 1}, {0, 0, 1}}) {
    check_axes(host_of);
    check_interrupted_steps(host_of);
  }
  check_abort({0, 0});
  check_delegate({0, 0, 0});
  check_delegate({0, 1});
  check_message_before_goodbye();
  check_departure({0, 0, 0});
  check_timeout();
  check_long_receive({0, 0, 0});
  check_long_receive({0, 1, 2});
  std::puts("communicator_test: all passed");
}
