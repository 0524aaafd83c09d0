// The link in shared memory: the conformance suite of links, and counters that only a broken peer writes.
#include "links/shm_link.h"

#include "link_suite.h"

using namespace ronde;
using namespace ronde::testing;

namespace {

void check_zero_memory_is_an_empty_pipe() {
  auto memory = std::make_unique<ShmPipe[]>(2);
  std::memset(static_cast<void*>(memory.get()), 0, 2 * ShmPipe::bytes());
  Bell bell;
  ShmLink link(1, 0, "host-a", &memory[0], &memory[1], BellHandle(&bell));
  int in = 0;
  link.recv(kSum10, &in, sizeof(in));
  CHECK(!link.progress() && link.pending() && link.received() == 0);
}

// Refuses impossible counters before it copies a byte.
void check_wild_counters() {
  for (const uint64_t wild : {uint64_t{ShmPipe::kCapacity + 1}, uint64_t{1} << 63}) {
    auto pipes = std::make_unique<ShmPipe[]>(2);
    Bell bell;
    ShmLink link(1, 0, "host-a", &pipes[0], &pipes[1], BellHandle(&bell));
    int value = 0;
    pipes[1].written = wild;
    link.recv(kSum10, &value, sizeof(value));
    auto error = thrown_by<Failure>([&] { link.progress(); });
    CHECK(error.rank == 1 && contains(error, "rank 1 on host-a has corrupted"));

    ShmLink sender(1, 0, "host-a", &pipes[0], &pipes[1], BellHandle(&bell));
    pipes[0].taken = wild;
    sender.send(kSum10, &value, sizeof(value));
    error = thrown_by<Failure>([&] { sender.progress(); });
    CHECK(contains(error, "rank 1 on host-a has corrupted"));
  }
}

}  // namespace

int main() {
  check_link(Wire::kShm);
  check_zero_memory_is_an_empty_pipe();
  check_wild_counters();
}
