// The engine's hot path with threads as ranks: random orders, decisions over one and several hosts, negotiation rounds,
// evictions of pending tensors, lingering, failures. Also the arithmetic that only the engine uses.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/cycle.h"
#include "engine/neutral.h"
#include "kernels/reduce.h"
#include "rank_communicators.h"

namespace ronde {
namespace {

using namespace testing;

constexpr size_t kCapacity = 100;
constexpr size_t kBufferBytes = 1 << 16;

// One rank's engine: its cycle, and the thread that Python normally provides. A negotiation round calls `negotiate`.
class Rank {
 public:
  Rank(Communicator& communicator, const std::shared_ptr<Mapping>& memory, int64_t linger_ns, size_t arity)
      : communicator_(communicator) {
    const uint32_t segment = communicator.symmetric()->add(memory, part_bytes(), communicator.local_rank());
    std::byte* const part = communicator.symmetric()->own_part(segment);
    cycle_ = std::make_unique<Cycle>(communicator, part, kCapacity, part + board_bytes(), kBufferBytes, linger_ns,
                                     false, arity);
    std::vector<int> ranks(static_cast<size_t>(communicator.size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    cycle_->recorder().record_into(timeline, "", ranks);
    for (uint32_t slot = 0; slot < kCapacity; ++slot) insert(slot);
    communicator.barrier();
    thread_ = std::thread([this] { work(); });
  }
  ~Rank() { end_thread(); }
  void end_thread() {
    cycle_->stop();
    if (thread_.joinable()) thread_.join();
  }
  static size_t board_bytes() { return (Board::bytes(kCapacity) + 4095) / 4096 * 4096; }
  static size_t part_bytes() { return board_bytes() + kBufferBytes; }

  static Signature signature(uint32_t slot) {
    Signature signature;
    signature.shape = {static_cast<int64_t>(1 + slot * 7 % 50)};
    return signature;
  }
  void insert(uint32_t slot) { cycle_->insert(slot, std::to_string(slot), signature(slot), {}); }

  struct Tensor {
    std::vector<float> values;
    std::shared_ptr<Completion> completion;
  };
  void submit(uint32_t slot, Tensor& tensor, float value) {
    tensor.values.assign(signature(slot).count(), value);
    const Cycle::Memory memory{tensor.values.data(), tensor.values.data()};
    Cycle::Submitted submitted = cycle_->submit(std::to_string(slot), signature(slot), {&memory, 1}, false);
    CHECK(submitted.answer == Cycle::Answer::kHit && submitted.slot == slot);
    tensor.completion = std::move(submitted.completion);
  }
  void wait(Completion& completion) {
    if (cycle_->wait(completion, Cycle::Patience::kDrive)) return;
    while (!cycle_->wait(completion, Cycle::Patience::kSleep)) {
    }
  }
  Cycle& cycle() { return *cycle_; }
  const std::shared_ptr<Timeline> timeline = std::make_shared<Timeline>();
  std::function<void(Rank&)> negotiate = [](Rank&) {};
  std::atomic<int> negotiations{0};
  std::atomic<bool> failed{false};

 private:
  void work() {
    try {
      while (cycle_->run() == Cycle::Event::kNegotiate) {
        negotiate(*this);
        ++negotiations;
        cycle_->end_negotiation();
      }
    } catch (const Failure&) {
      failed.store(true);
    }
  }

  Communicator& communicator_;
  std::unique_ptr<Cycle> cycle_;
  std::thread thread_;
};

void with_engines(const std::vector<int>& host_of, int64_t linger_ns,
                  const std::function<void(Communicator&, Rank&)>& program, size_t arity = 2) {
  const size_t hosts = static_cast<size_t>(*std::max_element(host_of.begin(), host_of.end())) + 1;
  std::vector<std::shared_ptr<Mapping>> memory;
  for (size_t host = 0; host < hosts; ++host) {
    memory.push_back(shared_memory(Rank::part_bytes() * std::count(host_of.begin(), host_of.end(), int(host))));
  }
  run(host_of, {}, [&](Communicator& communicator) {
    Rank rank(communicator, memory[host_of[communicator.rank()]], linger_ns, arity);
    program(communicator, rank);
  });
}

// Slot 0 serves as the barrier at the end of a program.
void meet_at_barrier(Rank& rank) {
  Rank::Tensor tensor;
  rank.submit(0, tensor, 1);
  rank.wait(*tensor.completion);
}

void submit_all_in_random_order(Communicator& communicator, Rank& rank, int rounds) {
  std::mt19937 random(static_cast<unsigned>(communicator.rank()));
  std::vector<uint32_t> order(kCapacity);
  std::iota(order.begin(), order.end(), 0);
  const float total = static_cast<float>(communicator.size() * (communicator.size() + 1) / 2);
  for (int round = 0; round < rounds; ++round) {
    std::vector<Rank::Tensor> tensors(kCapacity);
    std::shuffle(order.begin(), order.end(), random);
    const auto half = [&](size_t begin) {
      for (size_t i = begin; i < kCapacity; i += 2) {
        rank.submit(order[i], tensors[order[i]], static_cast<float>(communicator.rank() + 1 + round));
      }
    };
    std::thread other([&] { half(1); });
    half(0);
    other.join();
    std::shuffle(order.begin(), order.end(), random);
    for (uint32_t slot : order) rank.wait(*tensors[slot].completion);
    for (const Rank::Tensor& tensor : tensors) {
      for (float value : tensor.values) CHECK(value == total + static_cast<float>(round * communicator.size()));
    }
  }
}

void test_random_orders() {
  for (const std::vector<int>& host_of :
       std::vector<std::vector<int>>{{0}, {0, 0}, {0, 0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 2}}) {
    for (int64_t linger_ns : {int64_t{0}, int64_t{300'000}}) {
      with_engines(host_of, linger_ns, [](Communicator& communicator, Rank& rank) {
        submit_all_in_random_order(communicator, rank, 10);
        meet_at_barrier(rank);
      });
    }
  }
}

// A tree of hosts with several levels. Any rank may request a negotiation round at any time.
void test_deep_trees() {
  struct Case {
    std::vector<int> host_of;
    size_t arity;
  };
  for (const Case& each : {Case{{0, 1, 2, 3}, 1}, Case{{0, 0, 1, 2, 2, 3, 4}, 2}, Case{{0, 1, 2, 3, 4, 5}, 4}}) {
    std::barrier ready(static_cast<ptrdiff_t>(each.host_of.size()));
    with_engines(
        each.host_of, 0,
        [&ready](Communicator& communicator, Rank& rank) {
          // Like the real round, it ends when all ranks are in it.
          rank.negotiate = [&](Rank&) { communicator.barrier(); };
          ready.arrive_and_wait();  // before any rank requests one
          rank.cycle().want_negotiation();
          submit_all_in_random_order(communicator, rank, 2);
          for (int round = 0; round < 4; ++round) {
            if (communicator.rank() % 4 == round) rank.cycle().want_negotiation();
            submit_all_in_random_order(communicator, rank, 1);
          }
          CHECK(rank.negotiations.load() >= 1);
          meet_at_barrier(rank);
        },
        each.arity);
  }
}

// Every rank switches its timeline on and off at independent times, while tensors run.
void test_timelines() {
  for (const std::vector<int>& host_of : std::vector<std::vector<int>>{{0, 0}, {0, 0, 1}}) {
    with_engines(host_of, 0, [](Communicator& communicator, Rank& rank) {
      char path[] = "/tmp/ronde-engine-test-XXXXXX";
      close(mkstemp(path));
      std::thread switches([&] {
        for (int round = 0; round < 3; ++round) {
          rank.timeline->start({path, communicator.rank(), communicator.size(), "host", true, 1 << 12});
          std::this_thread::sleep_for(std::chrono::milliseconds(3 + 2 * communicator.rank()));
          CHECK(rank.timeline->stop().empty());
        }
      });
      submit_all_in_random_order(communicator, rank, 10);
      switches.join();
      meet_at_barrier(rank);
      unlink(path);
    });
  }
}

// Rank 0 has submitted slot 5 when the slot is evicted: it gets the tensor back, and the slot works for the next one.
void test_evicting_a_pending_tensor() {
  for (const std::vector<int>& host_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1}, {0, 1, 2, 3}}) {
    std::barrier ready(static_cast<ptrdiff_t>(host_of.size()));
    with_engines(
        host_of, 0,
        [&ready](Communicator& communicator, Rank& rank) {
          const bool first = communicator.rank() == 0;
          std::shared_ptr<Completion> evicted;
          rank.negotiate = [&](Rank& self) {
            evicted = self.cycle().evict(5);
            self.insert(5);
          };
          ready.arrive_and_wait();  // before any rank requests the round
          Rank::Tensor tensor;
          if (first) {
            rank.submit(5, tensor, 1);
            rank.cycle().want_negotiation();
          }
          while (rank.negotiations.load() == 0) std::this_thread::yield();
          CHECK((evicted != nullptr) == first);
          if (first) CHECK(evicted == tensor.completion && evicted->is_pending());
          Rank::Tensor again;
          rank.submit(5, again, 2);
          rank.wait(*again.completion);
          CHECK(again.values.front() == 2.0f * static_cast<float>(communicator.size()));
          if (first) CHECK(evicted->is_pending());
          meet_at_barrier(rank);
        },
        1);
  }
}

// A burst for which no thread waits runs when the linger time is over.
// Without the engines' threads: each rank's waiting thread sleeps until a later rank submits, and does the steps.
void test_a_waiting_thread_needs_no_other() {
  for (const std::vector<int>& host_of : {std::vector<int>{0, 0, 0}, std::vector<int>{0, 0, 1, 1}}) {
    std::barrier submitted(static_cast<ptrdiff_t>(host_of.size()));
    with_engines(host_of, 0, [&submitted](Communicator& communicator, Rank& rank) {
      meet_at_barrier(rank);
      rank.end_thread();
      const int size = communicator.size();
      for (int turn = 0; turn < size; ++turn) {
        const int delay = (communicator.rank() + turn) % size;
        std::this_thread::sleep_for(std::chrono::milliseconds(5 * delay));
        Rank::Tensor tensor;
        rank.submit(1, tensor, 1);
        rank.wait(*tensor.completion);
        CHECK(tensor.values[0] == static_cast<float>(size));
      }
      if (communicator.rank() == size - 1) {
        submitted.arrive_and_wait();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // then most of the others sleep
        communicator.abort("on purpose");
      } else {
        Rank::Tensor tensor;
        rank.submit(1, tensor, 1);
        submitted.arrive_and_wait();
        rank.wait(*tensor.completion);
        CHECK(tensor.completion->has_failed());
      }
    });
  }
}

// Two threads wait for tensors that become ready in either order: the one that sleeps as driver does the steps of both.
void test_two_threads_wait() {
  with_engines({0, 0}, 0, [](Communicator& communicator, Rank& rank) {
    meet_at_barrier(rank);
    for (int round = 0; round < 20; ++round) {
      const auto reduce = [&](uint32_t slot) {
        Rank::Tensor tensor;
        rank.submit(slot, tensor, 1);
        rank.wait(*tensor.completion);
        CHECK(tensor.values[0] == 2.0f);
      };
      if (communicator.rank() == 0) {
        std::thread other([&] { reduce(2); });
        reduce(1);
        other.join();
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        reduce(2);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        reduce(1);
      }
    }
  });
}

void test_lingering_ends() {
  with_engines({0, 0}, 2'000'000, [](Communicator&, Rank& rank) {
    std::vector<Rank::Tensor> tensors(20);
    for (uint32_t slot = 0; slot < tensors.size(); ++slot) rank.submit(slot, tensors[slot], 1);
    for (const Rank::Tensor& tensor : tensors) {
      while (tensor.completion->is_pending()) std::this_thread::yield();
    }
    meet_at_barrier(rank);
  });
}

// Rank 1 runs out of data: the others continue without it, on the hot path, until it resumes.
void test_no_rank_waits_for_a_joined_rank() {
  for (const std::vector<int>& host_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 1}}) {
    std::barrier ready(static_cast<ptrdiff_t>(host_of.size()));
    with_engines(host_of, 0, [&](Communicator& communicator, Rank& rank) {
      const bool is_absent = communicator.rank() == 1;
      rank.negotiate = [&](Rank& self) {
        if (!is_absent) return;
        if (self.negotiations.load() == 0) {
          self.cycle().absent();
        } else {
          self.cycle().resume();
        }
      };
      ready.arrive_and_wait();  // before any rank requests the round
      if (is_absent) {
        rank.cycle().join();
        rank.cycle().want_negotiation();
        CHECK_THROWS(rank.cycle().submit("1", Rank::signature(1), {}, false), UsageError);
      }
      while (rank.negotiations.load() == 0) std::this_thread::yield();
      for (int round = 0; round < 300 && !is_absent; ++round) {
        std::vector<Rank::Tensor> tensors(7);
        for (uint32_t slot = 0; slot < tensors.size(); ++slot) rank.submit(slot, tensors[slot], 1);
        for (const Rank::Tensor& tensor : tensors) {
          rank.wait(*tensor.completion);
          CHECK(tensor.values.back() == static_cast<float>(communicator.size() - 1));
        }
      }
      ready.arrive_and_wait();
      if (communicator.rank() == 0) rank.cycle().want_negotiation();
      while (rank.negotiations.load() < 2) std::this_thread::yield();
      submit_all_in_random_order(communicator, rank, 2);
      meet_at_barrier(rank);
    });
  }
}

// A group is ready when all ranks have submitted it, and completes as one.
void test_groups() {
  std::barrier ready(2);
  with_engines({0, 0}, 0, [&ready](Communicator& communicator, Rank& rank) {
    Signature group = Rank::signature(9);
    group.more = {{DType::kInt32, {30'000}}, {DType::kFloat32, {}}};
    rank.negotiate = [&](Rank& self) {
      self.cycle().evict(9);
      self.cycle().insert(9, "group", group, {});
    };
    ready.arrive_and_wait();  // before any rank requests the round
    if (communicator.rank() == 0) rank.cycle().want_negotiation();
    while (rank.negotiations.load() == 0) std::this_thread::yield();
    for (int round = 0; round < 3; ++round) {
      std::vector<float> first(group.count(), 1), last(1, 2);
      std::vector<int32_t> second(30'000, 3);
      const std::vector<Cycle::Memory> memory{
          {first.data(), first.data()}, {second.data(), second.data()}, {last.data(), last.data()}};
      CHECK_THROWS(rank.cycle().submit("group", group, std::span(memory).first(2), false), UsageError);
      const Cycle::Submitted submitted = rank.cycle().submit("group", group, memory, false);
      CHECK(submitted.answer == Cycle::Answer::kHit);
      rank.wait(*submitted.completion);
      CHECK(first.back() == 2 && second.back() == 6 && last.back() == 4);
    }
    meet_at_barrier(rank);
  });
}

// The bits of numbers of a real type, or of the parts of a complex one: zeros of both signs, numbers and infinities.
std::vector<uint64_t> number_bits(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {0, 0x8000, 0x3c01, 0x7c00, 0xfc00};
    case DType::kBfloat16:
      return {0, 0x8000, 0x3f81, 0x7f80, 0xff80};
    case DType::kFloat32:
    case DType::kComplex64:
      return {0, 0x80000000, 0x3f800001, 0x7f800000, 0xff800000};
    case DType::kFloat64:
    case DType::kComplex128:
      return {0, 0x8000000000000000, 0x3ff0000000000001, 0x7ff0000000000000, 0xfff0000000000000};
    case DType::kBool:
      return {0, 1};
    default:
      return {0, 1, 0x7f, 0x8000000000000080, UINT64_MAX};
  }
}

// All numbers of number_bits(), or all pairs of them.
std::vector<unsigned char> numbers_of(DType dtype) {
  const bool is_complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const size_t part_bytes = size_of(dtype) / (is_complex ? 2 : 1);
  std::vector<unsigned char> values;
  const auto add = [&](uint64_t bits) {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(&bits);
    values.insert(values.end(), bytes, bytes + part_bytes);
  };
  for (const uint64_t first : number_bits(dtype)) {
    if (!is_complex) add(first);
    for (const uint64_t second : is_complex ? number_bits(dtype) : std::vector<uint64_t>{}) {
      add(first);
      add(second);
    }
  }
  return values;
}

void test_neutral_elements_change_nothing() {
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    for (int op = 0; op < kReduceOpCount; ++op) {
      const auto type = static_cast<DType>(dtype);
      const auto operation = static_cast<ReduceOp>(op);
      if (!is_supported(type, operation)) continue;
      const std::vector<unsigned char> values = numbers_of(type);
      std::vector<unsigned char> neutral(values.size(), 0xee), result(values.size());
      const size_t count = values.size() / size_of(type);
      fill_neutral(type, operation, neutral.data(), count);
      const void *const before[] = {neutral.data(), values.data()}, *const after[] = {values.data(), neutral.data()},
                        *const alone[] = {neutral.data(), neutral.data()};
      for (const auto* sources : {before, after}) {
        reduce({type, operation, 1}, result.data(), sources, 2, count);
        CHECK(result == values);
      }
      reduce({type, operation, 1}, result.data(), alone, 2, count);
      CHECK(result == neutral || operation == ReduceOp::kAverage);
    }
  }
  std::vector<float> ones(3, 5);
  fill_neutral(DType::kFloat32, ReduceOp::kProduct, ones.data(), 3);
  CHECK(ones == std::vector<float>(3, 1));
  std::vector<uint16_t> many(10'001);  // more than the block that is copied
  fill_neutral(DType::kBfloat16, ReduceOp::kSum, many.data(), many.size());
  CHECK(many == std::vector<uint16_t>(10'001, 0x8000));
}

void test_an_abort_fails_pending_and_later_tensors() {
  for (const std::vector<int>& host_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}}) {
    std::barrier submitted(2);
    with_engines(host_of, 0, [&submitted](Communicator& communicator, Rank& rank) {
      Rank::Tensor tensor;
      if (communicator.rank() == 0) rank.submit(3, tensor, 1);
      submitted.arrive_and_wait();
      if (communicator.rank() == 0) {
        rank.wait(*tensor.completion);
        CHECK(tensor.completion->has_failed());
      } else {
        communicator.abort("enough");
      }
      while (!rank.failed.load()) std::this_thread::yield();
      CHECK(rank.cycle().failure()->kind == FailureKind::kAborted);
      CHECK_THROWS(rank.cycle().submit("4", Rank::signature(4), {}, false), Failure);
    });
  }
}

// All results are correct while the parameters of batching and fusion change and rank 0 measures.
void test_tuning_between_batches() {
  for (const std::vector<int>& host_of :
       std::vector<std::vector<int>>{{0}, {0, 0}, {0, 1}, {0, 1, 2}, {0, 0, 1, 1}, {0, 0, 1}}) {
    std::barrier ready(static_cast<ptrdiff_t>(host_of.size()));
    with_engines(host_of, 300'000, [&ready](Communicator& communicator, Rank& rank) {
      rank.negotiate = [](Rank& self) {
        const auto round = static_cast<size_t>(self.negotiations.load());
        Tunables values = self.cycle().tunables();
        values.fusion_bytes = size_t{1} << (5 * round % 22);
        values.linger_ns = static_cast<int64_t>(round % 3) * 100'000;
        values.batch_bytes = size_t{1} << (7 * round % 15);
        values.largest_fused_bytes = size_t{1} << (3 * round % 10);
        values.switch_over.doubling_bytes = round % 3 * 64;
        values.switch_over.ring_bytes = round % 2 == 0 ? SwitchOver::kByRanks : 0;
        values.switch_over.hierarchical_bytes = round % 4 * 40;
        self.cycle().tune(values);
        const Tunables now = self.cycle().tunables();
        CHECK(now.fusion_bytes == std::min(values.fusion_bytes, kBufferBytes));
        CHECK(now.batch_bytes == values.batch_bytes && now.linger_ns == values.linger_ns);
        CHECK(now.switch_over.ring_bytes == values.switch_over.ring_bytes);
      };
      ready.arrive_and_wait();  // before any rank requests a round
      if (communicator.rank() == 0) rank.cycle().meter().start(2, 3);
      for (int round = 0; round < 8; ++round) {
        submit_all_in_random_order(communicator, rank, 1);
        if (communicator.rank() == round % communicator.size()) rank.cycle().want_negotiation();
      }
      meet_at_barrier(rank);
    });
  }
}

// Two samples of two steps. A step is busy for 12 ms and idle for 5 ms; a tensor that comes only once loses the marker.
void test_meter() {
  constexpr auto kBusy = std::chrono::milliseconds(12), kIdle = std::chrono::milliseconds(5);
  Meter meter;
  CHECK(!meter.is_on() && !meter.decided(7, 100));
  meter.start(2, 2);
  CHECK(meter.is_on() && !meter.decided(7, 1000));
  int steps = 0;
  for (bool is_full = false; !is_full; ++steps) {
    CHECK(steps < 100 && meter.take_samples().empty());
    meter.submitted();
    meter.submitted();
    is_full = meter.decided(2, 10);
    is_full = meter.decided(3, 30) || is_full;
    meter.ended();
    std::this_thread::sleep_for(kBusy);
    meter.ended();
    std::this_thread::sleep_for(kIdle);
  }
  const std::vector<Meter::Sample> samples = meter.take_samples();
  CHECK(samples.size() == 2 && meter.take_samples().empty() && meter.is_on());
  for (const Meter::Sample& sample : samples) {
    CHECK(sample.steps >= 2 && sample.bytes == 40 * sample.steps);
    const auto busy_ns = static_cast<int64_t>(sample.steps) * std::chrono::nanoseconds(kBusy).count();
    CHECK(sample.busy_ns >= busy_ns);
  }
  CHECK(steps >= 12);  // eight until the marker changes, then four
  meter.start(1, 0);
  CHECK(!meter.is_on() && !meter.decided(2, 10));
}

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_neutral_elements_change_nothing();
  ronde::test_random_orders();
  ronde::test_deep_trees();
  ronde::test_timelines();
  ronde::test_evicting_a_pending_tensor();
  ronde::test_lingering_ends();
  ronde::test_a_waiting_thread_needs_no_other();
  ronde::test_two_threads_wait();
  ronde::test_no_rank_waits_for_a_joined_rank();
  ronde::test_groups();
  ronde::test_tuning_between_batches();
  ronde::test_meter();
  ronde::test_an_abort_fails_pending_and_later_tensors();
  return 0;
}
