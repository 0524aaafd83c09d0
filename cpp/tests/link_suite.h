// The conformance suite of link.h, which every link passes.
#pragma once

#include <atomic>

#include "rank_threads.h"

namespace ronde::testing {

inline const Call kSum10{.sequence = 7, .count = 10, .kind = Kind::kAllreduce, .dtype = DType::kFloat32};

inline void finish(Mesh& mesh, int peer, Ticket sent, Ticket received) {
  Link& link = mesh.link(peer);
  mesh.wait_until([&] { return link.sent() >= sent && link.received() >= received; });
}

// Many messages of all sizes in both directions at once, all queued before the first wait.
inline void check_fifo_both_ways(Wire wire, int streams, Seals seals) {
  const std::vector<size_t> sizes = {0,      1,       4,       4032,          4033,           0, 65537, 262144,
                                     262145, 1 << 20, 3000001, (1 << 20) - 1, 5 * 262144 + 3, 2};
  Ranks ranks(2, wire, streams, {}, seals);
  ranks.run([&](Mesh& mesh) {
    const int peer = 1 - mesh.rank();
    Link& link = mesh.link(peer);
    std::vector<std::vector<unsigned char>> out, in;
    Ticket sent = 0, received = 0;
    for (int round = 0; round < 2; ++round) {
      for (const size_t bytes : sizes) {
        out.push_back(pattern(bytes, static_cast<unsigned>(out.size() + 100 * mesh.rank())));
        in.emplace_back(bytes);
        sent = link.send(kSum10, out.back().data(), bytes);
        received = link.recv(kSum10, in.back().data(), bytes);
        CHECK(sent == out.size() && received == in.size());
        if (round == 1) finish(mesh, peer, sent, received);  // one by one
      }
    }
    CHECK(link.pending() == false);
    for (size_t i = 0; i < in.size(); ++i) CHECK(in[i] == pattern(in[i].size(), unsigned(i + 100 * peer)));
  });
}

// A message waits in the link until its receiver queues a receive.
inline void check_late_receiver(Wire wire, int streams, Seals seals) {
  Ranks ranks(2, wire, streams, {}, seals);
  std::atomic<bool> sent_all{false};
  ranks.run([&](Mesh& mesh) {
    Link& link = mesh.link(1 - mesh.rank());
    const int values[] = {11, 22, 33};
    if (mesh.rank() == 0) {
      Ticket last = 0;
      for (const int& value : values) last = link.send(kSum10, &value, sizeof(value));
      finish(mesh, 1, last, 0);
      sent_all = true;
      sent_all.notify_all();
      return;
    }
    sent_all.wait(false);
    for (const int value : values) {
      int got = 0;
      finish(mesh, 0, 0, link.recv(kSum10, &got, sizeof(got)));
      CHECK(got == value && !link.pending());
    }
  });
}

inline void check_mismatch(Wire wire, int streams, Seals seals) {
  Call other = kSum10;
  other.count = 11;
  for (const auto& [call, bytes, words] :
       {std::tuple{other, size_t{40},
                   "rank 0 called allreduce of 11 float32 by sum, but rank 1 called allreduce of 10"},
        std::tuple{kSum10, size_t{44}, "rank 0 sends 44 bytes, but rank 1 expects 40 bytes"}}) {
    Ranks ranks(2, wire, streams, {}, seals);
    ranks.run([&, call = call, bytes = bytes, words = words](Mesh& mesh) {
      Link& link = mesh.link(1 - mesh.rank());
      std::vector<unsigned char> data(bytes, 1);
      if (mesh.rank() == 0) return finish(mesh, 1, link.send(call, data.data(), bytes), 0);
      std::vector<unsigned char> in(40, 0);
      const Ticket ticket = link.recv(kSum10, in.data(), in.size());
      const auto error = thrown_by<MismatchError>([&] { finish(mesh, 0, 0, ticket); });
      CHECK(contains(error, words));
      CHECK(in == std::vector<unsigned char>(40, 0));  // no byte was accepted
    });
  }
}

// Another thread fails the communicator while this rank sleeps in a receive without a sender.
inline void check_failure_wakes_sleeper(Wire wire, int streams, Seals seals) {
  Ranks ranks(2, wire, streams, {}, seals);
  std::atomic<bool> asleep{false};
  std::thread aborter([&] {
    asleep.wait(false);
    usleep(20'000);  // so that it probably sleeps; the test is correct without it
    ranks.failure(0).set(Failure(FailureKind::kAborted, 1, "rank 1 called abort()"));
    ranks.bell_handle(0).ring();
  });
  Mesh& mesh = ranks.mesh(0);
  int in = 0;
  const Ticket ticket = mesh.link(1).recv(kSum10, &in, sizeof(in));
  asleep = true;
  asleep.notify_all();
  const auto error = thrown_by<Failure>([&] { finish(mesh, 1, 0, ticket); });
  CHECK(error.kind == FailureKind::kAborted && error.rank == 1);
  aborter.join();
}

inline void check_link(Wire wire, int streams = 1, Seals seals = {}) {
  check_fifo_both_ways(wire, streams, seals);
  check_late_receiver(wire, streams, seals);
  check_mismatch(wire, streams, seals);
  check_failure_wakes_sleeper(wire, streams, seals);
}

}  // namespace ronde::testing
