// Forks while other threads are active: the child closes everything and ends, whichever locks they held.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "host/symmetric.h"
#include "rank_communicators.h"

namespace ronde {
namespace {

using namespace testing;

// Runs `body` in a forked child, which must end; an alarm ends a child that hangs.
void in_child(const std::function<void()>& body) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(30);
    body();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// A thread continuously asks for places, among so many segments that it nearly always holds the lock.
void test_arrays_that_a_child_drops() {
  constexpr size_t kBytes = 4096;
  const auto memory = shared_memory(kBytes);
  SymmetricSegments segments;
  uint32_t last = 0;
  for (int i = 0; i < 1500; ++i) last = segments.add(memory, kBytes, 0);
  std::atomic<bool> stopping{false};
  std::thread asking([&] {
    const int private_memory = 0;
    while (!stopping.load()) CHECK(segments.place_of(&private_memory, sizeof(private_memory)).segment == 0);
  });
  CHECK(!segments.is_inherited());
  for (int round = 0; round < 20; ++round) {
    in_child([&] {
      CHECK(segments.is_inherited());
      segments.drop(last);
      in_child([&] { segments.drop(last - 1); });
    });
  }
  stopping.store(true);
  asking.join();
  segments.drop(last);
  CHECK_THROWS(segments.own_part(last), std::logic_error);
}

// All ranks are in calls over links, whose queues change continuously.
void test_a_communicator_in_the_middle_of_calls() {
  constexpr int kForks = 20;
  Communicator* forked = nullptr;
  std::atomic<int> forks{0};
  std::barrier ready(3);
  std::thread forking([&] {
    ready.arrive_and_wait();
    for (; forks.load() < kForks; ++forks) {
      in_child([&] {
        forked->abandon();
        forked->abandon();  // as a child's child does
        float x = 0;
        CHECK_THROWS(forked->allreduce(&x, &x, 1, DType::kFloat32, ReduceOp::kSum), UsageError);
        forked->shutdown();
      });
    }
  });
  run({0, 1}, {}, [&](Communicator& communicator) {
    if (communicator.rank() == 0) forked = &communicator;
    ready.arrive_and_wait();
    std::vector<float> x(5000, 1);
    for (float goes_on = 1; goes_on != 0;) {
      communicator.allreduce(x.data(), x.data(), x.size(), DType::kFloat32, ReduceOp::kAverage);
      goes_on = forks.load() < kForks ? 1.0f : 0.0f;
      communicator.broadcast(&goes_on, 1, DType::kFloat32, 0);
    }
    CHECK(x.front() == 1);
  });
  forking.join();
}

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_arrays_that_a_child_drops();
  ronde::test_a_communicator_in_the_middle_of_calls();
  return 0;
}
