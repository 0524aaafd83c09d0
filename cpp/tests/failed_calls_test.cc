// What becomes of symmetric buffers if a call fails: no rank writes to the buffer of one that has left.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "algorithms/adasum.h"
#include "base/error.h"
#include "base/scratch.h"
#include "check.h"
#include "host_group_ranks.h"

namespace ronde {
namespace {

using testing::call_of;

// What becomes of the buffers of two ranks if a call fails on rank 0. Each rank maps the memory at its own addresses,
// as processes do.
class FailedCall {
 public:
  static constexpr size_t kCount = 1 << 20;
  static constexpr size_t kBytes = kCount * sizeof(float);

  struct Rank {
    HostGroup& group;
    SymmetricSegments& symmetric;
    float* own;
    bool has_all(float value) const {
      return std::all_of(own, own + kCount, [value](float each) { return each == value; });
    }
  };

  using Program = std::function<void(Rank)>;
  static void run(const Program& rank_0, const Program& rank_1) {
    FailureState failure;
    run(rank_0, rank_1, failure);
  }
  static void run(const Program& rank_0, const Program& rank_1, FailureState& failure) {
    const int fd = memfd_create("test", MFD_CLOEXEC);
    CHECK(ftruncate(fd, 2 * kBytes) == 0);
    const std::shared_ptr<Mapping> memory[2] = {std::make_shared<Mapping>(dup(fd), 2 * kBytes),
                                                std::make_shared<Mapping>(fd, 2 * kBytes)};
    const auto program = [&](HostGroup& group, SymmetricSegments& symmetric) {
      const int rank = group.index();
      auto* own = reinterpret_cast<float*>(symmetric.own_part(symmetric.add(memory[rank], kBytes, rank)));
      std::fill(own, own + kCount, 1 + static_cast<float>(rank));
      (rank == 0 ? rank_0 : rank_1)({group, symmetric, own});
    };
    testing::run(2, 4096, program, failure);
  }
};

Call call_in_place() { return call_of(Kind::kAllreduce, FailedCall::kCount); }

HostGroup::Buffers announce_in_place(const FailedCall::Rank& rank) {
  return rank.group.announce(call_in_place(), rank.own, rank.own, FailedCall::kBytes);
}

constexpr auto lets_wait = [](int) { return false; };

// Rank 0 has left the call when the results of `operation` are due in all buffers.
void test_no_write_to_a_rank_that_has_left(const std::function<void(HostGroup&, float*)>& operation) {
  const auto leave = [&](FailedCall::Rank rank) {
    rank.group.leave();
    CHECK_THROWS(operation(rank.group, rank.own), Failure);
    std::fill(rank.own, rank.own + FailedCall::kCount, 7.0f);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(rank.has_all(7));
  };
  FailedCall::run(leave, [&](FailedCall::Rank rank) { CHECK_THROWS(operation(rank.group, rank.own), Failure); });
}

void test_no_write_to_a_rank_that_has_left() {
  constexpr size_t kCount = FailedCall::kCount;
  const Reduction sum{DType::kFloat32, ReduceOp::kSum, 1};
  test_no_write_to_a_rank_that_has_left(
      [&](HostGroup& group, float* x) { group.allreduce(call_in_place(), sum, x, x, kCount); });
  test_no_write_to_a_rank_that_has_left([&](HostGroup& group, float* x) {
    group.reduce(call_in_place(), sum, x, group.index() == 0 ? x : nullptr, kCount, 0);
  });
  test_no_write_to_a_rank_that_has_left([&](HostGroup& group, float* x) {
    const size_t counts[] = {kCount};
    Scratch scratch;
    adasum_in_host(group, call_in_place(), x, x, counts, scratch);
  });
}

// Rank 0 leaves while rank 1 writes: it gets its buffer back after at most one piece, however slow rank 1 is.
void test_leaving_in_the_middle_of_a_write() {
  std::atomic<bool> is_writing{false}, ends_piece{false};
  const auto leave = [&](FailedCall::Rank rank) {
    announce_in_place(rank);
    while (!is_writing) std::this_thread::yield();
    rank.group.leave();
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ends_piece = true;
    });
    rank.group.take_back_output(lets_wait);
    CHECK(ends_piece);
    CHECK(rank.own[0] == 5 && rank.own[FailedCall::kCount - 1] == 1);
    CHECK(rank.symmetric.place_of(rank.own, 1).segment != 0);
    other.join();
  };
  FailedCall::run(leave, [&](FailedCall::Rank rank) {
    auto* const theirs = reinterpret_cast<std::byte*>(announce_in_place(rank).out[0]);
    const auto write = [&](size_t begin, size_t bytes) {
      is_writing = true;
      while (!ends_piece) std::this_thread::yield();
      auto* const first = reinterpret_cast<float*>(theirs + begin);
      std::fill(first, first + bytes / sizeof(float), 5.0f);
    };
    CHECK_THROWS(rank.group.write_in_pieces(FailedCall::kBytes, 1, write), Failure);
    rank.group.leave();
  });
}

// Rank 1 is stopped in the middle of a write, longer than rank 0 waits.
void test_a_rank_that_does_not_leave() {
  std::atomic<bool> is_writing{false}, has_taken_back{false}, has_written{false};
  const auto take_back = [&](FailedCall::Rank rank) {
    announce_in_place(rank);
    while (!is_writing) std::this_thread::yield();
    rank.group.leave();
    rank.group.take_back_output(lets_wait);
    CHECK(rank.has_all(1));  // the same content
    std::fill(rank.own, rank.own + FailedCall::kCount, 7.0f);
    has_taken_back = true;
    while (!has_written) std::this_thread::yield();
    CHECK(rank.has_all(7));
    CHECK(rank.symmetric.place_of(rank.own, 1).segment == 0);  // from now on private memory
    CHECK(rank.symmetric.live().bits == 0);
  };
  FailedCall::run(take_back, [&](FailedCall::Rank rank) {
    auto* const theirs = reinterpret_cast<float*>(announce_in_place(rank).out[0]);
    is_writing = true;
    while (!has_taken_back) std::this_thread::yield();
    std::fill(theirs, theirs + FailedCall::kCount, 5.0f);
    has_written = true;
  });
}

// A rank that has ended, or has not come to the call yet, is not waited for.
void test_ranks_that_cannot_write() {
  std::atomic<bool> is_over{false};
  const auto check = [&](FailedCall::Rank rank) {
    announce_in_place(rank);
    rank.group.leave();
    rank.group.take_back_output([](int other) { return other == 1; });
    CHECK(rank.symmetric.place_of(rank.own, 1).segment != 0);
    is_over = true;
  };
  FailedCall::run(check, [&](FailedCall::Rank rank) {
    announce_in_place(rank);
    while (!is_over) std::this_thread::yield();
  });
}

// Rank 0 fails while it waits for rank 1, which still reads. Rank 1 must not take what it reads for good.
void test_leaving_while_another_rank_reads() {
  std::atomic<bool> reads{false}, has_left{false};
  FailureState failure;
  const auto leave = [&](FailedCall::Rank rank) {
    announce_in_place(rank);
    while (!reads) std::this_thread::yield();
    failure.set(Failure(FailureKind::kTimeout, -1, "waited too long"));
    CHECK_THROWS(rank.group.release_buffers(), Failure);
    rank.group.leave();
    has_left = true;
  };
  const auto read = [&](FailedCall::Rank rank) {
    announce_in_place(rank);
    reads = true;
    while (!has_left) std::this_thread::yield();
    CHECK_THROWS(rank.group.release_buffers(), Failure);
  };
  FailedCall::run(leave, read, failure);
}

#ifndef __SANITIZE_THREAD__  // which delays signals

std::atomic<bool> has_touched{false}, may_go_on{false};
std::byte* guarded = nullptr;

void go_on_later(int, siginfo_t*, void*) {
  has_touched = true;
  while (!may_go_on) usleep(100);
  mprotect(guarded, FailedCall::kBytes, PROT_READ | PROT_WRITE);
}

// The same with results in private memory: rank 1 is held at its first access to rank 0's input, and rank 0, which has
// done its own share, waits for it.
void test_leaving_while_another_rank_reads_an_input() {
  struct sigaction action = {};
  action.sa_sigaction = go_on_later;
  action.sa_flags = SA_SIGINFO;
  CHECK(sigaction(SIGSEGV, &action, nullptr) == 0);
  constexpr size_t kCount = 2048;  // one window
  const Reduction sum{DType::kFloat32, ReduceOp::kSum, 1};
  const Call call = call_of(Kind::kAllreduce, kCount);
  FailureState failure;
  const auto leave = [&](FailedCall::Rank rank) {
    rank.group.announce(call);
    std::vector<float> out(kCount);
    std::thread ends([&] {
      while (!has_touched) usleep(100);
      usleep(50'000);  // rank 0 does its share; without this time the test passes, too
      failure.set(Failure(FailureKind::kTimeout, -1, "waited too long"));
    });
    CHECK_THROWS(rank.group.allreduce(call, sum, rank.own, out.data(), kCount), Failure);
    rank.group.leave();
    std::fill(rank.own, rank.own + kCount, 100.0f);  // its program goes on with the array
    may_go_on = true;
    ends.join();
  };
  const auto read = [&](FailedCall::Rank rank) {
    guarded = rank.symmetric.resolve(rank.symmetric.place_of(rank.own, FailedCall::kBytes), 0, FailedCall::kBytes);
    CHECK(mprotect(guarded, FailedCall::kBytes, PROT_NONE) == 0);
    rank.group.announce(call);
    std::vector<float> out(kCount);
    CHECK_THROWS(rank.group.allreduce(call, sum, rank.own, out.data(), kCount), Failure);
  };
  FailedCall::run(leave, read, failure);
}

#endif

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_no_write_to_a_rank_that_has_left();
  ronde::test_leaving_in_the_middle_of_a_write();
  ronde::test_a_rank_that_does_not_leave();
  ronde::test_ranks_that_cannot_write();
  ronde::test_leaving_while_another_rank_reads();
#ifndef __SANITIZE_THREAD__
  ronde::test_leaving_while_another_rank_reads_an_input();
#endif
  return 0;
}
