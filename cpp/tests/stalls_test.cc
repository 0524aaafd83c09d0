// The stall inspection with threads as ranks: the submissions and the progress of all ranks, in one note or several;
// stacks with and without the interpreter; a sleep that ends with a submission.
#include "waiting/stalls.h"

#include <algorithm>
#include <barrier>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/cycle_waits.h"
#include "rank_communicators.h"
#include "waiting/call_waits.h"

namespace ronde {
namespace {

using namespace testing;

constexpr size_t kCapacity = 200;

Signature one_float() {
  Signature signature;
  signature.shape = {1};
  return signature;
}

// One rank: its cycle, without the engine's thread, and its stall inspection.
class Rank {
 public:
  explicit Rank(Communicator& communicator) : communicator_(communicator) {
    const size_t bytes = (Board::bytes(kCapacity) + 4095) / 4096 * 4096;
    const uint32_t segment = communicator.symmetric()->add(shared_memory(bytes * communicator.local_size()), bytes,
                                                           communicator.local_rank());
    cycle_ = std::make_unique<Cycle>(communicator, communicator.symmetric()->own_part(segment), kCapacity, nullptr, 0,
                                     0, false, 8);
    for (uint32_t slot = 0; slot < kCapacity; ++slot) cycle_->insert(slot, name(slot), one_float(), {});
    hub_ = std::make_shared<StallHub>();
    stalls_ = std::make_unique<Stalls>(communicator, std::make_unique<CycleWaits>(*cycle_), hub_, "engine");
    communicator.barrier();
  }
  static std::string name(uint32_t slot) { return "tensor " + std::to_string(slot); }
  void submit(uint32_t slot) {
    const Cycle::Memory memory{&value_, &value_};
    CHECK(cycle_->submit(name(slot), one_float(), {&memory, 1}, false).answer == Cycle::Answer::kHit);
  }
  Stalls& stalls() { return *stalls_; }
  StallHub& hub() { return *hub_; }
  Cycle& cycle() { return *cycle_; }
  std::vector<uint64_t> ids() {
    std::vector<uint64_t> ids;
    for (const auto& item : stalls_->find_waits(INT64_MAX, {}).items) ids.push_back(item.id);
    return ids;
  }
  // The next events of this type, one from each of `count` ranks.
  std::vector<Stalls::Event> events(Stalls::Event::Type type, size_t count) {
    std::vector<Stalls::Event> found;
    while (found.size() < count) {
      const auto events = hub_->next_events(-1);
      CHECK(events.has_value());
      for (const auto& event : *events) {
        if (event.type == type) found.push_back(event);
      }
    }
    return found;
  }

 private:
  Communicator& communicator_;
  std::unique_ptr<Cycle> cycle_;
  std::shared_ptr<StallHub> hub_;
  std::unique_ptr<Stalls> stalls_;
  float value_ = 0;
};

using Type = Stalls::Event::Type;
const std::vector<std::vector<int>> kHosts = {{0, 1, 2}, {0, 1}};

// Rank 0 has submitted all tensors and one miss, the others every other tensor. Their ids need several notes.
void test_submissions_of_all_ranks() {
  for (const auto& host_of : kHosts) {
    std::barrier step(static_cast<ptrdiff_t>(host_of.size()));
    run(host_of, {}, [&](Communicator& communicator) {
      Rank rank(communicator);
      const bool asks = communicator.rank() == 0;
      for (uint32_t slot = 0; slot < kCapacity; slot += asks ? 1 : 2) rank.submit(slot);
      const auto miss = std::make_shared<Completion>();
      if (asks) rank.cycle().pending().add_miss("miss", Kind::kBarrier, miss);
      step.arrive_and_wait();
      if (asks) {
        const auto ids = rank.ids();
        CHECK(ids.size() == kCapacity + 1);
        rank.stalls().ask(5, ids, true);
        auto answers = rank.events(Type::kAnswer, host_of.size());
        std::sort(answers.begin(), answers.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
        for (size_t other = 0; other < answers.size(); ++other) {
          const auto& answer = answers[other];
          CHECK(answer.rank == static_cast<int>(other) && answer.inquiry == 5 && answer.has.size() == ids.size());
          CHECK(answer.calls == answers.front().calls && !answer.is_in_negotiation);
          const auto count = std::count(answer.has.begin(), answer.has.end(), true);
          CHECK(count == (other == 0 ? kCapacity + 1 : kCapacity / 2));
        }
      } else {
        CHECK(rank.events(Type::kAsked, 1).front().ids.size() == kCapacity + 1);
      }
      step.arrive_and_wait();
      miss->finish(true);
      CHECK(rank.ids().size() == (asks ? kCapacity : kCapacity / 2));
      for (const auto& each : rank.stalls().survey(10'000'000'000)) CHECK(each && each->tensors == 0);
      step.arrive_and_wait();
    });
  }
}

// A long text arrives completely. If the interpreter does not answer in time, the watch's thread does: with an empty
// text here, because there is no signal handler.
void test_stacks() {
  run({0, 1}, {}, [&](Communicator& communicator) {
    Rank rank(communicator);
    if (communicator.rank() == 0) {
      rank.stalls().ask_for_stacks(1, 1);
      const auto told = rank.events(Type::kStacks, 1).front();
      CHECK(told.rank == 1 && told.inquiry == 1 && !told.is_raw && told.text == std::string(2000, 'x'));
      rank.stalls().ask_for_stacks(2, 1);
      const auto untold = rank.events(Type::kStacks, 1).front();
      CHECK(untold.inquiry == 2 && untold.is_raw && untold.text.empty());
    } else {
      const auto wanted = rank.events(Type::kStacksWanted, 1).front();
      rank.stalls().answer_stacks(wanted.inquiry, wanted.rank, std::string(2000, 'x'));
      rank.events(Type::kStacksWanted, 1);
    }
    communicator.barrier();
  });
}

void test_a_sleep_ends_with_a_submission() {
  run({0}, {}, [&](Communicator& communicator) {
    int wakes = 0;
    Rank rank(communicator);
    for (uint32_t slot = 0; slot < kCapacity; ++slot) {
      const auto seen = rank.stalls().find_waits(0, {});
      CHECK(seen.items.empty() && (seen.next_ns >= 0) == (slot > 0));
      if (slot > 0) {  // something is pending, so the next submission wakes no thread
        rank.cycle().pending().on_wake([&wakes] { ++wakes; });
        rank.submit(slot);
        CHECK(wakes == 0);
        continue;
      }
      std::thread submitting([&] { rank.submit(slot); });
      CHECK(rank.hub().next_events(-1).has_value());
      submitting.join();
    }
    rank.hub().stop();
    CHECK(!rank.hub().next_events(-1).has_value());
  });
}

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_submissions_of_all_ranks();
  ronde::test_stacks();
  ronde::test_a_sleep_ends_with_a_submission();
  return 0;
}
