// Mailboxes with threads as ranks, on one host and on several.
#include "messages/mailbox.h"

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/steady_clock.h"
#include "check.h"
#include "rank_communicators.h"
#include "rank_threads.h"

namespace ronde {
namespace {

using namespace testing;

constexpr uint64_t kContext = 7;
using Bytes = std::vector<unsigned char>;
using Hosts = std::vector<int>;

void await(Mailbox& box, const Mailbox::Handle& message) {
  const int64_t until_ns = steady_now_ns() + 60'000'000'000;
  while (message->is_pending() && steady_now_ns() < until_ns) box.wait(*message, until_ns);
  CHECK(!message->is_pending());
}

void await_done(Mailbox& box, const Mailbox::Handle& message) {
  await(box, message);
  if (message->has_failed()) std::fprintf(stderr, "%s\n", message->failure().what());
  CHECK(!message->has_failed());
}

Failure await_failure(Mailbox& box, const Mailbox::Handle& message) {
  await(box, message);
  CHECK(message->has_failed());
  return message->failure();
}

using Program = std::function<void(Communicator&, Mailbox&)>;

// All ranks have their mailboxes until all have ended the program.
void run_boxes(const Hosts& host_of, const Program& program) {
  std::atomic<int> begun{0}, ended{0};
  const auto await_all = [&](std::atomic<int>& count) {
    count.fetch_add(1);
    while (count.load() < static_cast<int>(host_of.size())) std::this_thread::yield();
  };
  run(host_of, {}, [&](Communicator& communicator) {
    communicator.barrier();
    Mailbox box(communicator);
    await_all(begun);  // else a program could abort the barrier of another rank
    program(communicator, box);
    await_all(ended);
  });
}

// --- Matching --------------------------------------------------------------------------------------------------------

void test_sizes_in_both_directions(const Hosts& host_of) {
  run_boxes(host_of, [&](Communicator& communicator, Mailbox& box) {
    const int me = communicator.rank(), other = 1 - me;
    for (const size_t size : {0, 1, 65535, 65536, 65537, 3'000'000}) {
      for (const bool sends_first : {true, false}) {
        const Bytes out = pattern(size, static_cast<unsigned>(me));
        Bytes in(size);
        Mailbox::Handle send, receive;
        if (sends_first) send = box.send(other, kContext, 3, out.data(), size);
        receive = box.receive(other, kContext, 3, in.data(), size);
        if (!sends_first) send = box.send(other, kContext, 3, out.data(), size);
        await_done(box, receive);
        await_done(box, send);
        CHECK(receive->source() == other);
        CHECK(in == pattern(size, static_cast<unsigned>(other)));
      }
    }
  });
}

// Of each tag the order of sends counts; the receives are posted in the opposite order of tags.
void test_tags_overtake(const Hosts& host_of) {
  run_boxes(host_of, [&](Communicator& communicator, Mailbox& box) {
    const std::vector<size_t> sizes{100, 100'000, 10, 200'000, 1};
    std::vector<Bytes> data;
    std::vector<Mailbox::Handle> messages;
    for (uint32_t tag = 0; tag < 4; ++tag) {
      for (const size_t size : sizes) data.push_back(pattern(size, static_cast<unsigned>(data.size())));
    }
    if (communicator.rank() == 0) {
      for (size_t i = 0; i < data.size(); ++i) {
        const auto tag = static_cast<uint32_t>(i / sizes.size());
        messages.push_back(box.send(1, kContext, tag, data[i].data(), data[i].size()));
      }
      for (const auto& message : messages) await_done(box, message);
      return;
    }
    for (uint32_t tag = 4; tag-- > 0;) {
      for (size_t i = 0; i < sizes.size(); ++i) {
        Bytes in(sizes[i]);
        await_done(box, box.receive(0, kContext, tag, in.data(), in.size()));
        CHECK(in == data[tag * sizes.size() + i]);
      }
    }
  });
}

void test_receives_from_any(const Hosts& host_of) {
  run_boxes(host_of, [&](Communicator& communicator, Mailbox& box) {
    constexpr int kTimes = 50;
    const int size = communicator.size();
    if (communicator.rank() > 0) {
      for (int value = 0; value < kTimes; ++value) {
        await_done(box, box.send(0, kContext, 1, &value, sizeof(value)));
      }
      return;
    }
    std::map<int, int> next;
    std::vector<int> senders;
    for (int rank = 1; rank < size; ++rank) senders.push_back(rank);
    for (int i = 0; i < kTimes * (size - 1); ++i) {
      int value = -1;
      const auto message = box.receive(Mailbox::kAnyPeer, kContext, 1, &value, sizeof(value), senders);
      await_done(box, message);
      CHECK(value == next[message->source()]++);
    }
    CHECK_THROWS(box.receive(Mailbox::kAnyPeer, kContext, 1, nullptr, 0), UsageError);
    CHECK_THROWS(box.receive(size, kContext, 1, nullptr, 0), UsageError);
  });
}

void test_sends_to_oneself() {
  run_boxes({0, 0}, [](Communicator& communicator, Mailbox& box) {
    const int me = communicator.rank();
    for (const size_t size : {0, 5, 100'000}) {
      for (const bool sends_first : {true, false}) {
        const Bytes out = pattern(size, 3);
        Bytes in(size);
        Mailbox::Handle send, receive;
        if (sends_first) send = box.send(me, kContext, 1, out.data(), size);
        if (sends_first) CHECK(send->is_pending() == (size > Mailbox::kEagerBytes));
        receive = sends_first ? box.receive(Mailbox::kAnyPeer, kContext, 1, in.data(), size, {0, 1})
                              : box.receive(me, kContext, 1, in.data(), size);
        if (!sends_first) send = box.send(me, kContext, 1, out.data(), size);
        await_done(box, receive);
        await_done(box, send);
        CHECK(in == out && receive->source() == me);
      }
    }
  });
}

void test_sizes_that_differ(const Hosts& host_of) {
  run_boxes(host_of, [&](Communicator& communicator, Mailbox& box) {
    const int me = communicator.rank(), other = 1 - me;
    for (const auto& [sent, received] : std::vector<std::pair<size_t, size_t>>{{10, 20}, {100'000, 10}, {0, 1}}) {
      for (const bool sends_first : {true, false}) {
        Bytes out(sent), in(received, 9), fine(4);
        const auto send_all = [&] {
          await_done(box, box.send(other, kContext, 1, out.data(), sent));
          await_done(box, box.send(other, kContext, 1, fine.data(), fine.size()));
        };
        if (me == 0 && sends_first) send_all();
        if (me == 0 && !sends_first) {
          int ready = 0;
          await_done(box, box.receive(other, kContext, 2, &ready, sizeof(ready)));
          send_all();
        }
        if (me == 1) {
          const auto bad = box.receive(other, kContext, 1, in.data(), received);
          const auto good = box.receive(other, kContext, 1, fine.data(), fine.size());
          const int ready = 1;
          if (!sends_first) await_done(box, box.send(other, kContext, 2, &ready, sizeof(ready)));
          const Failure failure = await_failure(box, bad);
          CHECK(failure.kind == FailureKind::kMismatch);
          CHECK(contains(failure, std::to_string(sent).c_str()) && contains(failure, std::to_string(received).c_str()));
          await_done(box, good);
          CHECK(in == Bytes(received, 9));
        }
      }
    }
  });
}

// --- Threads and schedules -------------------------------------------------------------------------------------------

// Everybody sends everything before anybody receives.
void test_floods(const Hosts& host_of) {
  run_boxes(host_of, [&](Communicator& communicator, Mailbox& box) {
    constexpr int kMessages = 100;
    const Bytes out = pattern(50'000, 1);
    std::vector<Bytes> in;
    std::vector<Mailbox::Handle> messages;
    for (int i = 0; i < kMessages; ++i) {
      for (int peer = 0; peer < communicator.size(); ++peer) {
        messages.push_back(box.send(peer, kContext, 0, out.data(), out.size()));
      }
    }
    in.reserve(messages.size());
    for (int i = 0; i < kMessages; ++i) {
      for (int peer = 0; peer < communicator.size(); ++peer) {
        Bytes& each = in.emplace_back(out.size());
        messages.push_back(box.receive(peer, kContext, 0, each.data(), each.size()));
      }
    }
    for (const auto& message : messages) await_done(box, message);
    for (const Bytes& each : in) CHECK(each == out);
  });
}

void test_threads(const Hosts& host_of) {
  run_boxes(host_of, [&](Communicator& communicator, Mailbox& box) {
    const int other = 1 - communicator.rank();
    std::vector<std::thread> threads;
    for (uint32_t tag = 0; tag < 3; ++tag) {
      threads.emplace_back([&box, other, tag] {
        for (int i = 0; i < 100; ++i) {
          const int out = i;
          int in = -1;
          const auto send = box.send(other, kContext, tag, &out, sizeof(out));
          await_done(box, box.receive(other, kContext, tag, &in, sizeof(in)));
          await_done(box, send);
          CHECK(in == i);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

// Every rank knows the messages of all, and posts its own in an order of its own.
void test_random_schedules(const Hosts& host_of, unsigned first_seed, unsigned seeds) {
  struct Planned {
    int from, to;
    uint32_t tag;
    size_t bytes;
  };
  run_boxes(host_of, [&](Communicator& communicator, Mailbox& box) {
    const int me = communicator.rank();
    for (unsigned seed = first_seed; seed < first_seed + seeds; ++seed) {
      std::mt19937 plan(seed), own(seed * 1000 + static_cast<unsigned>(me));
      std::vector<Planned> planned(1 + plan() % 20);
      for (Planned& each : planned) {
        const size_t sizes[] = {0, 1, 1000, 65536, 65537, 300'000};
        each = {static_cast<int>(plan() % host_of.size()), static_cast<int>(plan() % host_of.size()),
                static_cast<uint32_t>(plan() % 3), sizes[plan() % std::size(sizes)]};
      }
      // Messages of one sender, receiver and tag keep their order, so shuffle only which of them comes next.
      std::map<std::tuple<bool, int, int, uint32_t>, std::vector<size_t>> queues;
      std::vector<std::tuple<bool, int, int, uint32_t>> order;
      for (size_t i = 0; i < planned.size(); ++i) {
        for (const bool sends : {true, false}) {
          if ((sends ? planned[i].from : planned[i].to) != me) continue;
          const auto key = std::tuple(sends, planned[i].from, planned[i].to, planned[i].tag);
          queues[key].push_back(i);
          order.push_back(key);
        }
      }
      std::ranges::shuffle(order, own);
      std::vector<Bytes> buffers(planned.size() * 2);
      std::vector<Mailbox::Handle> messages;
      for (const auto& key : order) {
        const size_t i = queues[key].front();
        queues[key].erase(queues[key].begin());
        const Planned& each = planned[i];
        const bool sends = std::get<0>(key);
        Bytes& buffer = buffers[i * 2 + (sends ? 0 : 1)];
        buffer = sends ? pattern(each.bytes, static_cast<unsigned>(i)) : Bytes(each.bytes);
        messages.push_back(sends ? box.send(each.to, seed, each.tag, buffer.data(), each.bytes)
                                 : box.receive(each.from, seed, each.tag, buffer.data(), each.bytes));
        if (own() % 4 == 0) box.wait(*messages.back(), steady_now_ns() + 1000);
      }
      for (const auto& message : messages) await_done(box, message);
      for (size_t i = 0; i < planned.size(); ++i) {
        if (planned[i].to == me) CHECK(buffers[i * 2 + 1] == pattern(planned[i].bytes, static_cast<unsigned>(i)));
      }
    }
  });
}

// --- Ends ------------------------------------------------------------------------------------------------------------

void test_cancel(const Hosts& host_of) {
  run_boxes(host_of, [&](Communicator& communicator, Mailbox& box) {
    const int me = communicator.rank(), other = 1 - me;
    Bytes out(20'000'000), in(20'000'000), one(4), two(4);
    const auto send = box.send(other, kContext, 1, out.data(), out.size());
    const auto receive = box.receive(other, kContext, 1, in.data(), in.size());
    const auto never = box.receive(other, kContext, 2, one.data(), one.size());
    const auto kept = box.receive(other, kContext + 1, 2, two.data(), two.size());
    if (me == 0) box.cancel(kContext, "enough");
    if (me == 0) {
      CHECK(await_failure(box, never).kind == FailureKind::kAborted);
      CHECK(contains(await_failure(box, never), "enough"));
      await(box, send);
      await(box, receive);
      CHECK(await_failure(box, box.receive(other, kContext, 5, one.data(), 4)).kind == FailureKind::kAborted);
    } else {
      // What had arrived, or nothing, has; it does not wait for ever.
      await(box, receive);
      await(box, send);
      box.cancel(kContext, "enough here");
      await_failure(box, never);
    }
    await_done(box, box.send(other, kContext + 1, 2, two.data(), two.size()));
    await_done(box, kept);
  });
}

void test_close() {
  run_boxes({0, 0}, [](Communicator& communicator, Mailbox& box) {
    int value = 0;
    const auto pending = box.receive(1 - communicator.rank(), kContext, 1, &value, sizeof(value));
    std::thread closing([&] { box.close("the end"); });
    CHECK(contains(await_failure(box, pending), "the end"));
    closing.join();
    CHECK(await_failure(box, box.send(0, kContext, 1, &value, sizeof(value))).kind == FailureKind::kAborted);
    box.close("again");
    CHECK_THROWS(communicator.barrier(), UsageError);
  });
}

// A rank that leaves: what it had sent arrives, the rest fails, and the others go on.
void test_a_rank_leaves(const Hosts& host_of) {
  std::atomic<bool> has_left{false};
  run(host_of, {}, [&](Communicator& communicator) {
    Mailbox box(communicator);
    int value = communicator.rank();
    Bytes large(1'000'000);
    if (communicator.rank() == 0) {
      await_done(box, box.send(1, kContext, 1, &value, sizeof(value)));
      int ready = 0;
      await_done(box, box.receive(1, kContext, 9, &ready, sizeof(ready)));
      box.close("over");
      communicator.shutdown();
      has_left.store(true);
      return;
    }
    if (communicator.rank() == 1) await_done(box, box.send(0, kContext, 9, &value, sizeof(value)));
    const auto send = box.send(0, kContext, 2, large.data(), large.size());
    const auto never = box.receive(0, kContext, 2, &value, sizeof(value));
    const auto any = box.receive(Mailbox::kAnyPeer, kContext, 3, &value, sizeof(value), {0});
    for (const auto& message : {send, never, any}) {
      const Failure failure = await_failure(box, message);
      CHECK(failure.kind == FailureKind::kPeerLost && failure.rank == 0 && contains(failure, "has shut down"));
    }
    CHECK(await_failure(box, box.send(0, kContext, 2, &value, sizeof(value))).rank == 0);
    int in = -1;
    if (communicator.rank() == 1) await_done(box, box.receive(0, kContext, 1, &in, sizeof(in)));
    const int other = 3 - communicator.rank();
    const auto goes_on = box.receive(other, kContext, 4, &in, sizeof(in));
    await_done(box, box.send(other, kContext, 4, &value, sizeof(value)));
    await_done(box, goes_on);
    CHECK(in == other);
    // Both must have got the other's message before one leaves.
    await_done(box, box.send(other, kContext, 5, &value, sizeof(value)));
    await_done(box, box.receive(other, kContext, 5, &in, sizeof(in)));
  });
}

void test_a_rank_aborts(const Hosts& host_of) {
  run_boxes(host_of, [&](Communicator& communicator, Mailbox& box) {
    int value = 0;
    const auto never = box.receive(1 - communicator.rank(), kContext, 1, &value, sizeof(value));
    if (communicator.rank() == 0) communicator.abort("test");
    const Failure failure = await_failure(box, never);
    CHECK(failure.kind == FailureKind::kAborted && failure.rank == 0);
    CHECK(await_failure(box, box.send(0, kContext, 1, &value, sizeof(value))).kind == FailureKind::kAborted);
  });
}

void test_the_communicator_shuts_down_first() {
  run({0, 0}, {}, [](Communicator& communicator) {
    Mailbox box(communicator);
    int value = 0;
    const auto never = box.receive(1 - communicator.rank(), kContext, 1, &value, sizeof(value));
    std::thread waiting([&] { await(box, never); });
    communicator.shutdown();
    waiting.join();
    CHECK(never->has_failed());
    CHECK(await_failure(box, box.send(0, kContext, 1, &value, sizeof(value))).kind == FailureKind::kAborted);
  });
}

}  // namespace
}  // namespace ronde

int main() {
  using namespace ronde;
  for (const Hosts& hosts : {Hosts{0, 0}, Hosts{0, 1}}) {
    test_sizes_in_both_directions(hosts);
    test_tags_overtake(hosts);
    test_sizes_that_differ(hosts);
    test_threads(hosts);
    test_cancel(hosts);
    test_a_rank_aborts(hosts);
  }
  for (const Hosts& hosts : {Hosts{0, 0, 0}, Hosts{0, 1, 2}, Hosts{0, 0, 1}}) {
    test_receives_from_any(hosts);
    test_floods(hosts);
    test_random_schedules(hosts, 1, 20);
    test_a_rank_leaves(hosts);
  }
  test_sends_to_oneself();
  test_close();
  test_the_communicator_shuts_down_first();
  return 0;
}
