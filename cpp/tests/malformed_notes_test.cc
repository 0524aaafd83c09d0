// One rank sends the others' engines notes that no engine sends: the communicator fails on all ranks and names the
// sender, and no rank accesses memory out of bounds.
#include <barrier>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "engine/cycle.h"
#include "engine/cycle_waits.h"
#include "engine/rows.h"
#include "rank_communicators.h"
#include "waiting/stalls.h"

namespace ronde {
namespace {

using namespace testing;

constexpr size_t kCapacity = 100;

struct Case {
  int from, to;
  std::vector<uint32_t> words;
  const char* text;
  Watch::Channel channel = Watch::Channel::kEngine;
};

// Three hosts with a rank each, in a line: rank 2 reports to rank 1, and rank 1 to rank 0, which decides.
void check(const Case& each) {
  std::barrier ready(3);
  run({0, 1, 2}, {}, [&](Communicator& communicator) {
    const size_t bytes = (Board::bytes(kCapacity) + 4095) / 4096 * 4096;
    const uint32_t segment = communicator.symmetric()->add(shared_memory(bytes), bytes, 0);
    Cycle cycle(communicator, communicator.symmetric()->own_part(segment), kCapacity, nullptr, 0, 0, false, 1);
    Signature signature;
    signature.shape = {1};
    for (uint32_t slot = 0; slot < kCapacity; ++slot) cycle.insert(slot, std::to_string(slot), signature, {});
    Stalls stalls(communicator, std::make_unique<CycleWaits>(cycle), std::make_shared<StallHub>(), "engine");
    ready.arrive_and_wait();
    if (communicator.rank() == each.from) communicator.watch().send_note(each.to, each.words, each.channel);
    try {
      cycle.run();
      CHECK(!"an end without a failure");
    } catch (const Failure& failure) {
      CHECK(failure.kind == FailureKind::kPeerLost && failure.rank == each.from);
      const std::string text = failure.what();
      if (text.find(each.text) == std::string::npos) std::fprintf(stderr, "%s\n", text.c_str());
      CHECK(text.find("rank " + std::to_string(each.from) + " on host-") == 0);
      CHECK(text.find(each.text) != std::string::npos);
    }
  });
}

constexpr uint32_t kReady = 1, kWant = 2, kEntry = 3;

// Rows and shapes of the coordinator's stream.
void test_rows_that_fit_no_tensor() {
  Signature signature;
  signature.kind = Kind::kAllgather;
  signature.shape = {3, 2};
  const auto refuses = [&](std::vector<uint64_t> rows) {
    CHECK_THROWS((check_rows(signature, rows, 1, 2), 0), ProtocolError);
  };
  check_rows(signature, std::vector<uint64_t>{5, 3}, 1, 2);
  check_rows(signature, std::vector<uint64_t>{5, 0}, 1, 2);  // of a rank that has joined
  refuses({5});
  refuses({5, 3, 1});
  refuses({5, 4});
  refuses({uint64_t{1} << 60, 3});
  refuses({UINT64_MAX, 3});
  signature.kind = Kind::kAlltoall;
  check_rows(signature, std::vector<uint64_t>{9, 9, 1, 2}, 1, 2);
  refuses({9, 9, 2, 2});
  refuses({9, 9, UINT64_MAX, 2});
  refuses({1, 1});
  signature.kind = Kind::kAllreduce;
  check_rows(signature, {}, 1, 2);
  signature.shape = {int64_t{1} << 31, int64_t{1} << 31};
  refuses({});
  signature.shape = {0, -1};
  refuses({});
}

// The same in a negotiation round, in which all ranks blame rank 0.
void test_a_stream_that_fits_no_tensor() {
  Signature gathered, reduced;
  gathered.kind = Kind::kAllgather;
  gathered.shape = {3, 2};
  reduced.shape = {1};
  const std::vector<std::pair<std::string, std::function<void(Cycle&)>>> cases = {
      {"rows of another number of ranks", [&](Cycle& cycle) { cycle.insert(0, "a", gathered, {5}); }},
      {"more rows than the tensor of this rank has",
       [&](Cycle& cycle) { cycle.add_miss("a", gathered, {5, 4}, {}, 2, false); }},
      {"slot 100 of a cache with 100", [&](Cycle& cycle) { cycle.insert(kCapacity, "a", reduced, {}); }},
  };
  for (const auto& each : cases) {
    const std::string& text = each.first;  // clang 15: lambdas capture no structured bindings
    const std::function<void(Cycle&)>& take_over = each.second;
    std::barrier all(2);
    run({0, 1}, {}, [&](Communicator& communicator) {
      const size_t bytes = (Board::bytes(kCapacity) + 4095) / 4096 * 4096;
      const uint32_t segment = communicator.symmetric()->add(shared_memory(bytes), bytes, 0);
      Cycle cycle(communicator, communicator.symmetric()->own_part(segment), kCapacity, nullptr, 0, 0, false, 1);
      all.arrive_and_wait();
      try {
        communicator.rank() == 1 ? take_over(cycle) : static_cast<void>(cycle.run());
        CHECK(!"an end without a failure");
      } catch (const Failure& failure) {
        CHECK(failure.kind == FailureKind::kPeerLost && failure.rank == 0);
        CHECK(std::string(failure.what()).find("rank 0 on host-0 sent ") == 0);
        CHECK(std::string(failure.what()).find(text) != std::string::npos);
      }
      all.arrive_and_wait();
    });
  }
}

// The log of a host's leader, in shared memory, may be malformed, too.
void test_a_malformed_log() {
  for (const uint32_t words : {uint32_t{kCapacity} + 1, uint32_t{1}}) {
    run({0}, {}, [&](Communicator& communicator) {
      const size_t bytes = (Board::bytes(kCapacity) + 4095) / 4096 * 4096;
      const uint32_t segment = communicator.symmetric()->add(shared_memory(bytes), bytes, 0);
      std::byte* const part = communicator.symmetric()->own_part(segment);
      Cycle cycle(communicator, part, kCapacity, nullptr, 0, 0, false, 1);
      Board({part}, 0, kCapacity).append(std::vector<uint32_t>{words, kCapacity});
      try {
        cycle.run();
        CHECK(!"an end without a failure");
      } catch (const Failure& failure) {
        CHECK(failure.kind == FailureKind::kPeerLost && failure.rank == 0);
      }
    });
  }
}

}  // namespace
}  // namespace ronde

int main() {
  using namespace ronde;
  const std::vector<Case> cases = {
      {0, 1, {}, "a leader's note of 0 words"},
      {0, 1, {9, 9}, "unknown type 9"},
      {0, 1, {kEntry, 0}, "a part of an entry without its words"},
      {0, 1, {kEntry, 7, 1}, "a part of an entry without its words"},
      {0, 1, {kEntry, 0, 0}, "claims 0 slots"},
      {0, 1, {kEntry, 0, 1, kCapacity}, "slot 100 of a cache with 100"},
      {0, 1, {kEntry, 0, 1, UINT32_MAX}, "slot 4294967295 of a cache with 100"},
      {0, 1, {kEntry, 0, UINT32_MAX, 1}, "claims 4294967295 slots"},
      {0, 1, {kEntry, 0, 2, 5, 5}, "runs slot 5 twice"},
      {0, 1, {kEntry, 0, 1, 5}, "runs slot 5, which is not ready here"},
      {2, 1, {kEntry, 0, UINT32_MAX}, "not the parent of this rank"},
      {0, 2, {kEntry, 0, UINT32_MAX}, "not the parent of this rank"},
      {1, 0, {kEntry, 0, UINT32_MAX}, "not the parent of this rank"},
      {2, 0, {kReady, 0, 5}, "to its parent, which this rank is not"},
      {0, 1, {kWant, 1}, "to its parent, which this rank is not"},
      {1, 0, {kReady, 0, kCapacity}, "slot 100 of a cache with 100"},
      {1, 0, {kReady, 3, 5}, "a report for a negotiation round that has not begun"},
      {1, 0, {kWant, 2}, "a negotiation round after the next"},
      {1, 0, {kWant, 1, 1}, "a request for a negotiation round with extra words"},
      {1, 0, {0x6b6c4301, 1}, "a note about clocks"},
      {2, 1, {0x6b6c4301, 1, 1}, "a question about a clock"},
      {2, 1, {0x6b6c4302, 1, 1, 1, 1}, "an answer about its clock"},
      {0, 1, {0x6b6c4302, 1, 0x7fffffff, 1, 1}, "an answer about its clock"},
      {0, 1, {0x6b6c4302, 1, 1, 1, 0x80000000}, "a negative time of its clock"},
      {2, 0, {77, 1}, "unknown type 77", Watch::Channel::kStalls},
      {2, 0, {1}, "a note about stalls of 1 words", Watch::Channel::kStalls},
      {2, 0, {1, 1}, "a question about stalls", Watch::Channel::kStalls},
      {2, 0, {2, 1, 9, 9}, "an answer about stalls", Watch::Channel::kStalls},
      {2, 0, {2, 1, 2000, 0, 0, 0, 0, 0, 0, 0, 0, 0}, "an answer about stalls", Watch::Channel::kStalls},
      {2,
       0,
       {2, 1, 0, 0, 4000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
       "an answer about stalls without its text",
       Watch::Channel::kStalls},
      {2, 0, {4, 1, 0}, "stacks", Watch::Channel::kStalls},
      {2, 0, {4, 1, 0, 0, 4000, 1}, "stacks", Watch::Channel::kStalls},
  };
  for (const Case& each : cases) check(each);
  test_rows_that_fit_no_tensor();
  test_a_stream_that_fits_no_tensor();
  test_a_malformed_log();
  return 0;
}
