// Whole communicators with threads as ranks, on any number of simulated hosts.
#pragma once

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "communicator/communicator.h"
#include "connection_keys.h"

namespace ronde::testing {

inline std::pair<int, int> socket_pair() {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {ends[0], ends[1]};
}

inline std::shared_ptr<Mapping> shared_memory(size_t bytes) {
  const int fd = memfd_create("test", MFD_CLOEXEC);
  CHECK(ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  return std::make_shared<Mapping>(fd, bytes);
}

constexpr uint64_t kWorld = 1;  // the number of the communicator of all ranks

inline std::vector<int> world(int size) {
  std::vector<int> processes(static_cast<size_t>(size));
  std::iota(processes.begin(), processes.end(), 0);
  return processes;
}

inline std::vector<std::string> names_of(const std::vector<std::string>& hosts) {
  std::vector<std::string> names;
  for (const std::string& host : hosts) names.push_back("rank " + std::to_string(names.size()) + " on " + host);
  return names;
}

// Connects ranks that are threads, as bootstrap.py connects processes. Ranks with the same host_of[rank] share a host.
// The threads of a host share one mapping, so that ThreadSanitizer sees their accesses as one memory.
inline std::vector<Wiring> wire(const std::vector<int>& host_of, const Options& options) {
  const int size = static_cast<int>(host_of.size());
  std::vector<Wiring> wirings(size);
  std::vector<int> eventfds, local_sizes(size);
  std::vector<std::shared_ptr<Mapping>> segments(size);
  std::vector<std::map<int, Connection>> controls(size);
  for (int host : host_of) ++local_sizes[host];
  for (int host = 0; host < size; ++host) {
    if (local_sizes[host] == 0) continue;
    segments[host] = shared_memory(HostSegment::bytes(local_sizes[host], options.staging_bytes));
  }
  for (int rank = 0; rank < size; ++rank) eventfds.push_back(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  for (int rank = 0; rank < size; ++rank) {
    Wiring& wiring = wirings[rank];
    wiring.rank = rank;
    wiring.host_of = host_of;
    wiring.cores = static_cast<int>(std::thread::hardware_concurrency());
    wiring.segment = segments[host_of[rank]];
    for (int other = 0; other < size; ++other) {
      wiring.hosts.push_back("host-" + std::to_string(host_of[other]));
    }
    for (int lower = 0; lower < rank; ++lower) {
      const auto [control, their_control] = socket_pair();
      controls[rank][lower] = Descriptor(control);
      controls[lower][rank] = Descriptor(their_control);
      if (host_of[lower] == host_of[rank]) continue;
      controls[rank][lower].keys = keys_of_end(0);
      controls[lower][rank].keys = keys_of_end(1);
      for (int stream = 0; stream < 2; ++stream) {
        const auto [mine, theirs] = socket_pair();
        wiring.data[lower].emplace_back(Descriptor(mine), keys_of_end(0));
        wirings[lower].data[rank].emplace_back(Descriptor(theirs), keys_of_end(1));
      }
    }
  }
  for (int rank = 0; rank < size; ++rank) {
    const auto connections = std::make_shared<SharedConnections>(std::move(controls[rank]));
    for (int other = 0; other < size; ++other) {
      if (host_of[other] == host_of[rank]) connections->set_bell(other, Descriptor(dup(eventfds[other])));
    }
    wirings[rank].watch =
        std::make_unique<Watch>(rank, names_of(wirings[rank].hosts), connections, kWorld, world(size));
  }
  for (int fd : eventfds) close(fd);
  return wirings;
}

using Program = std::function<void(Communicator&)>;

inline void run(const std::vector<int>& host_of, const Options& options, const Program& program) {
  std::vector<Wiring> wirings = wire(host_of, options);
  std::vector<std::thread> threads;
  for (Wiring& wiring : wirings) {
    threads.emplace_back([&program, &options, &wiring] {
      Communicator communicator(std::move(wiring), options);
      program(communicator);
      communicator.shutdown();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ronde::testing
