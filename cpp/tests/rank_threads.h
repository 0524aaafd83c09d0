// Threads as the ranks of one communicator, each with its own mesh, over sockets or pipes in memory.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "connection_keys.h"
#include "links/mesh.h"
#include "links/shm_link.h"
#include "links/tcp_link.h"

namespace ronde::testing {

inline std::pair<int, int> unix_socket_pair() {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
  return {fds[0], fds[1]};
}

inline std::pair<int, int> tcp_socket_pair() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0);
  CHECK(listen(listener, 1) == 0);
  CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  const int client = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(connect(client, reinterpret_cast<sockaddr*>(&address), length) == 0);
  const int server = accept(listener, nullptr, nullptr);
  CHECK(server >= 0);
  close(listener);
  return {client, server};
}

inline std::string host_of(int rank) { return "host-" + std::string(1, static_cast<char>('a' + rank)); }

// One look at the link's sockets, then progress.
inline bool look_and_progress(Link& link) {
  std::vector<pollfd> fds;
  link.add_poll(fds);
  CHECK(poll(fds.data(), fds.size(), 0) >= 0);
  CHECK(link.take_poll(fds) == fds.size());
  return link.progress();
}

enum class Wire { kUnix, kTcp, kShm };

// Options of connections between hosts, whose frames always carry tags: tags on the payload, and encryption.
struct Seals {
  bool payload = false;
  bool conceals = false;
};

// Everything that the ranks share: bells, eventfds, pipes, and one failure state per rank.
class Ranks {
 public:
  Ranks(int size, Wire wire, int streams = 1, WaitPolicy policy = {}, Seals seals = {})
      : size_(size), seals_(seals), bells_(size), failures_(size) {
    for (int rank = 0; rank < size; ++rank) eventfds_.emplace_back(eventfd(0, EFD_NONBLOCK));
    for (int rank = 0; rank < size; ++rank) bell_handles_.emplace_back(&bells_[rank], &eventfds_[rank]);
    std::vector<std::vector<std::unique_ptr<Link>>> links(size);
    for (auto& row : links) row.resize(size);
    for (int a = 0; a < size; ++a) {
      for (int b = a + 1; b < size; ++b) {
        std::tie(links[a][b], links[b][a]) = wire == Wire::kShm ? pipes(a, b) : sockets(a, b, wire, streams);
      }
    }
    for (int rank = 0; rank < size; ++rank) {
      waiters_.push_back(std::make_unique<Waiter>(bell_handles_[rank], failures_[rank], policy));
      meshes_.push_back(std::make_unique<Mesh>(rank, std::move(links[rank]), *waiters_[rank]));
    }
  }

  int size() const { return size_; }
  Mesh& mesh(int rank) { return *meshes_[rank]; }
  FailureState& failure(int rank) { return failures_[rank]; }
  const BellHandle& bell_handle(int rank) const { return bell_handles_[rank]; }
  void leave(int rank) { meshes_[rank].reset(); }  // closes its connections

  // Runs body(mesh) on one thread per rank and waits for all.
  void run(const std::function<void(Mesh&)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank) threads.emplace_back([&, rank] { body(mesh(rank)); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  using Pair = std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>>;

  Pair sockets(int a, int b, Wire wire, int streams) {
    std::vector<Connection> ours, theirs;
    for (int i = 0; i < streams; ++i) {
      const auto [one, other] = wire == Wire::kTcp ? tcp_socket_pair() : unix_socket_pair();
      ours.emplace_back(Descriptor(one), keys_of_end(0, seals_.conceals));
      theirs.emplace_back(Descriptor(other), keys_of_end(1, seals_.conceals));
    }
    return {std::make_unique<TcpLink>(b, a, host_of(b), std::move(ours), seals_.payload),
            std::make_unique<TcpLink>(a, b, host_of(a), std::move(theirs), seals_.payload)};
  }

  Pair pipes(int a, int b) {
    ShmPipe* there = pipes_.emplace_back(std::make_unique<ShmPipe>()).get();
    ShmPipe* back = pipes_.emplace_back(std::make_unique<ShmPipe>()).get();
    return {std::make_unique<ShmLink>(b, a, host_of(b), there, back, bell_handles_[b]),
            std::make_unique<ShmLink>(a, b, host_of(a), back, there, bell_handles_[a])};
  }

  int size_;
  Seals seals_;
  std::vector<Bell> bells_;
  std::vector<FailureState> failures_;
  std::vector<Descriptor> eventfds_;
  std::vector<BellHandle> bell_handles_;
  std::vector<std::unique_ptr<ShmPipe>> pipes_;
  std::vector<std::unique_ptr<Waiter>> waiters_;
  std::vector<std::unique_ptr<Mesh>> meshes_;
};

// A piece of one long sequence of bytes, which is computed once: under ThreadSanitizer that takes longer than sending.
inline std::vector<unsigned char> pattern(size_t bytes, unsigned seed) {
  static const std::vector<unsigned char> sequence = [] {
    std::vector<unsigned char> all(size_t{4} << 20);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<unsigned char>(i * 2654435761u >> 7);
    return all;
  }();
  const size_t begin = seed * 97;
  CHECK(begin + bytes <= sequence.size());
  return {sequence.begin() + static_cast<std::ptrdiff_t>(begin),
          sequence.begin() + static_cast<std::ptrdiff_t>(begin + bytes)};
}

// The exception that `body` throws. Fails the test if it throws none.
template <class Exception>
Exception thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const Exception& exception) {
    return exception;
  }
  CHECK(!"an exception");
  std::abort();
}

inline bool contains(const std::exception& exception, const char* words) {
  if (std::strstr(exception.what(), words) != nullptr) return true;
  std::fprintf(stderr, "\"%s\" lacks \"%s\"\n", exception.what(), words);
  return false;
}

}  // namespace ronde::testing
