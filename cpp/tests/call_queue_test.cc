// Call queues with threads as ranks: pieces of memory, order, time limits, and the end of calls and queues.
#include "communicator/call_queue.h"

#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/steady_clock.h"
#include "check.h"
#include "rank_communicators.h"

namespace ronde {
namespace {

using namespace testing;

using Values = std::vector<double>;

Piece piece_of(Values& values) { return {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(double)}; }

Collective sum_of(Values& in, Values& out) {
  return {.kind = Kind::kAllreduce, .dtype = DType::kFloat64, .inputs = {piece_of(in)}, .outputs = {piece_of(out)}};
}

void wait(QueuedCall& call) {
  if (!call.spin()) {
    while (!call.sleep(Completion::kLongestSleepNs)) {
    }
  }
  call.check();
}

template <class Error>
std::string error_of(QueuedCall& call) {
  try {
    wait(call);
  } catch (const Error& error) {
    CHECK(call.has_failed() && !call.is_pending());
    return error.what();
  }
  CHECK(!"the call has not failed");
  return "";
}

// A sum of scaled pieces, which are packed except for the large one; the input stays as it is.
void test_pieces(Communicator& communicator) {
  CallQueue queue(communicator);
  const auto own = static_cast<double>(communicator.rank() + 1);
  const double ranks = communicator.size(), total = ranks * (ranks + 1) / 2;
  Values a(3, own), large(Collective::kOwnCallBytes / sizeof(double), 2 * own), b(5, 3 * own);
  Values a_sum(3), large_sum(large.size()), b_sum(5);
  Collective collective = sum_of(a, a_sum);
  collective.inputs = {piece_of(a), piece_of(large), piece_of(b)};
  collective.outputs = {piece_of(a_sum), piece_of(large_sum), piece_of(b_sum)};
  collective.factor = 0.5;
  const auto call = queue.post(collective);
  wait(*call);
  CHECK(a == Values(3, own) && large.front() == 2 * own && b == Values(5, 3 * own));
  CHECK(a_sum == Values(3, total / 2) && b_sum == Values(5, 3 * total / 2));
  CHECK(large_sum.front() == total && large_sum.back() == total);
  collective.factor = 1;
  collective.outputs = collective.inputs;
  CHECK(queue.try_run(collective));
  CHECK(a == Values(3, total) && large.back() == 2 * total && b == Values(5, 3 * total));
}

// Two threads post, and one of them runs calls itself whenever it may. Each call counts how many came before it.
void test_order(Communicator& communicator) {
  constexpr int kPosts = 300;
  CallQueue queue(communicator);
  std::atomic<int> ran{0};
  const auto post = [&](bool runs) {
    Values x(1, 1), sum(1);
    for (int i = 0; i < kPosts; ++i) {
      if (!runs || !queue.try_run(sum_of(x, sum))) wait(*queue.post(sum_of(x, sum)));
      CHECK(sum[0] == communicator.size());
      ++ran;
    }
  };
  std::thread other([&] { post(true); });
  post(false);
  other.join();
  CHECK(ran == 2 * kPosts);
  // Many calls on their way, on the same memory: only in order they give this result.
  Values x(1, 1);
  std::vector<std::shared_ptr<QueuedCall>> calls;
  double expected = 1;
  for (int i = 0; i < 20; ++i) {
    Collective collective = sum_of(x, x);
    collective.factor = i % 2 == 0 ? 1 : 0.25;
    calls.push_back(queue.post(collective));
    expected *= communicator.size() * collective.factor;
  }
  wait(*calls.back());
  for (const auto& call : calls) CHECK(!call->is_pending() && !call->has_failed());
  CHECK(x[0] == expected);
}

using FailingProgram = void (*)(Communicator&, std::barrier<>& first_call_done);

// A rank may be through a collective while another is still in it, and would end it there with a failure: the ranks
// wait for each other outside the communicator before one of them aborts it.
void run_until_failure(const std::vector<int>& host_of, FailingProgram program) {
  std::barrier first_call_done(static_cast<std::ptrdiff_t>(host_of.size()));
  testing::run(host_of, {}, [&](Communicator& communicator) { program(communicator, first_call_done); });
}

// The last rank does not come, and the others close their queues in the middle of the call.
void test_closing(Communicator& communicator, std::barrier<>& first_call_done) {
  CallQueue queue(communicator);
  Values x(1, 1);
  CHECK(queue.try_run(sum_of(x, x)));
  first_call_done.arrive_and_wait();
  if (communicator.rank() == communicator.size() - 1) {
    while (!communicator.has_failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK_THROWS(queue.try_run(sum_of(x, x)), Failure);
    return;
  }
  const auto running = queue.post(sum_of(x, x)), queued = queue.post(sum_of(x, x));
  std::string seen;
  std::thread waiting([&] { seen = error_of<Failure>(*running); });
  std::thread closing([&] { queue.close("closed by one thread"); });
  queue.close("closed by another thread");
  closing.join();
  waiting.join();
  CHECK(seen.find("aborted: closed by") != std::string::npos);
  CHECK(error_of<Failure>(*queued) == seen);
  CHECK_THROWS(queue.post(sum_of(x, x)), Failure);
}

// A call in a thread of the program is aborted, too.
void test_closing_a_call_at_once(Communicator& communicator, std::barrier<>& first_call_done) {
  CallQueue queue(communicator);
  Values x(1, 1);
  CHECK(queue.try_run(sum_of(x, x)));
  first_call_done.arrive_and_wait();
  if (communicator.rank() != 0) {
    while (!communicator.has_failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return;
  }
  std::atomic<bool> has_failed{false};
  std::thread running([&] {
    CHECK_THROWS(queue.try_run(sum_of(x, x)), Failure);
    has_failed = true;
  });
  while (communicator.watch().calls_begun() < 2) std::this_thread::yield();
  queue.close("closed");
  running.join();
  CHECK(has_failed);
}

void test_time_limit(Communicator& communicator, std::barrier<>& first_call_done) {
  constexpr int64_t kLimitNs = 50'000'000;
  CallQueue queue(communicator);
  Values x(1, 1);
  CHECK(queue.try_run(sum_of(x, x)));
  first_call_done.arrive_and_wait();
  if (communicator.rank() != 0) {
    while (!communicator.has_failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return;
  }
  Collective collective = sum_of(x, x);
  collective.timeout_ns = kLimitNs;
  const int64_t began_ns = steady_now_ns();
  const auto call = queue.post(collective);
  CHECK(error_of<Failure>(*call).starts_with("timed out: waited 50 ms in allreduce of 1 float64 by sum for rank 1"));
  CHECK(steady_now_ns() - began_ns >= kLimitNs);
  CHECK_THROWS(queue.try_run(sum_of(x, x)), Failure);
}

void test_wrong_arguments(Communicator& communicator) {
  CallQueue queue(communicator);
  Values x(2, 1), y(3, 1);
  CHECK_THROWS(queue.post(sum_of(x, y)), UsageError);
  CHECK_THROWS(queue.try_run(sum_of(x, y)), UsageError);
  Collective barrier{.factor = 2};
  CHECK_THROWS(queue.try_run(barrier), UsageError);
  CHECK(queue.try_run({}));
  queue.close("closed");
  try {
    queue.post({});
    CHECK(!"a closed queue takes a call");
  } catch (const UsageError& error) {
    CHECK(std::string(error.what()) == "the communicator's call queue has been closed: closed");
  }
}

void test_many_queues(Communicator& communicator) {
  Values x(1, 1), sum(1);
  for (int i = 0; i < 50; ++i) {
    CallQueue queue(communicator);
    if (i % 2 == 0) wait(*queue.post(sum_of(x, sum)));  // else the queue needs no thread
    CHECK(queue.try_run(sum_of(x, sum)));
    CHECK(sum[0] == communicator.size());
  }
}

}  // namespace
}  // namespace ronde

int main() {
  using namespace ronde;
  const std::vector<std::vector<int>> places{{0}, {0, 0}, {0, 1}, {0, 0, 1}};
  for (const auto& host_of : places) {
    testing::run(host_of, {}, test_pieces);
    testing::run(host_of, {}, test_order);
    testing::run(host_of, {}, test_wrong_arguments);
    testing::run(host_of, {}, test_many_queues);
    if (host_of.size() == 1) continue;
    run_until_failure(host_of, test_closing);
    run_until_failure(host_of, test_closing_a_call_at_once);
    run_until_failure(host_of, test_time_limit);
  }
  return 0;
}
