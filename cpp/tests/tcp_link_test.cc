#include "tcp_link.h"

#include <limits.h>

#include "link_suite.h"

using namespace ronde;
using namespace ronde::testing;

namespace {

// The peer dies with half a message under way: the waiter hears of it, by name.
void check_end_of_file_in_mid_message(int streams) {
  Ranks ranks(2, Wire::kTcp, streams);
  constexpr size_t kBytes = 64 << 20;
  std::atomic<bool> asleep{false};
  std::thread dying([&] {
    const std::vector<unsigned char> data(kBytes, 1);
    Mesh& mesh = ranks.mesh(1);
    Link& link = mesh.link(0);
    link.send(kSum10, data.data(), kBytes);
    link.progress();  // at most 16 MiB per stream
    asleep.wait(false);
    ranks.leave(1);
  });
  std::vector<unsigned char> in(kBytes);
  Mesh& mesh = ranks.mesh(0);
  const Ticket ticket = mesh.link(1).recv(kSum10, in.data(), kBytes);
  asleep = true;
  asleep.notify_all();
  const auto error = thrown_by<Failure>([&] { finish(mesh, 1, 0, ticket); });
  CHECK(error.kind == FailureKind::kPeerLost && error.rank == 1);
  CHECK(contains(error, "rank 1 on host-b"));
  dying.join();
}

void check_sender_hears_of_the_end() {
  Ranks ranks(2, Wire::kTcp, 2);
  const std::vector<unsigned char> data(64 << 20, 1);
  Mesh& mesh = ranks.mesh(0);
  const Ticket ticket = mesh.link(1).send(kSum10, data.data(), data.size());
  std::thread leaving([&] { ranks.leave(1); });
  const auto error = thrown_by<Failure>([&] { finish(mesh, 1, ticket, 0); });
  CHECK(error.kind == FailureKind::kPeerLost && error.rank == 1);
  CHECK(contains(error, "rank 1 on host-b"));
  leaving.join();
}

void check_end_of_file_between_messages() {
  const auto [here, there] = tcp_socket_pair();
  TcpLink link(2, 0, "host-c", {here});
  close(there);
  int in = 0;
  link.recv(kSum10, &in, sizeof(in));
  const auto error = thrown_by<Failure>([&] {
    while (true) link.progress();
  });
  CHECK(contains(error, "rank 2 on host-c closed its connection"));
}

void check_no_frame_at_all() {
  const auto [here, there] = tcp_socket_pair();
  TcpLink link(1, 0, "host-b", {here});
  const char request[] = "GET / HTTP/1.1\r\nHost: somewhere-else\r\nAccept: everything\r\n\r\n";
  CHECK(write(there, request, sizeof(request)) == sizeof(request));
  int in = 0;
  link.recv(kSum10, &in, sizeof(in));
  const auto error = thrown_by<Failure>([&] {
    while (true) link.progress();
  });
  CHECK(error.kind == FailureKind::kPeerLost && contains(error, "rank 1 on host-b sent something"));
  close(there);
}

// A frame that comes byte by byte is a frame.
void check_slow_frame() {
  const auto [here, there] = unix_socket_pair();
  TcpLink link(1, 0, "host-b", {here});
  unsigned char message[sizeof(Frame) + 4];
  const Frame frame{.call = kSum10, .bytes = 4};
  std::memcpy(message, &frame, sizeof(frame));
  std::memcpy(message + sizeof(frame), "abcd", 4);
  char in[4];
  link.recv(kSum10, in, 4);
  for (const unsigned char& byte : message) {
    CHECK(link.received() == 0);
    CHECK(link.progress() == false);
    CHECK(write(there, &byte, 1) == 1);
    CHECK(link.progress() == true);
  }
  CHECK(link.received() == 1 && std::memcmp(in, "abcd", 4) == 0);
  close(there);
}

// A small message costs one system call per side; poll is asked only about what can move.
void check_poll_set() {
  const auto [here, there] = tcp_socket_pair();
  const auto [here2, there2] = tcp_socket_pair();
  TcpLink a(1, 0, "host-b", {here, here2});
  TcpLink b(0, 1, "host-a", {there, there2});
  std::vector<pollfd> fds;
  a.add_poll(fds);
  CHECK(fds.empty());
  int out = 5, in = 0;
  a.send(kSum10, &out, sizeof(out));
  a.add_poll(fds);
  CHECK(fds.size() == 1 && fds[0].fd == here && fds[0].events == POLLOUT);
  CHECK(a.progress() && !a.pending());
  fds.clear();
  b.recv(kSum10, &in, sizeof(in));
  b.add_poll(fds);
  CHECK(fds.size() == 1 && fds[0].fd == there && fds[0].events == POLLIN);
  while (b.pending()) b.progress();
  CHECK(in == 5);
}

}  // namespace

int main() {
  for (const int streams : {1, 2, 3}) {
    check_link(Wire::kUnix, streams);
    check_link(Wire::kTcp, streams);
    check_end_of_file_in_mid_message(streams);
  }
  check_sender_hears_of_the_end();
  check_end_of_file_between_messages();
  check_no_frame_at_all();
  check_slow_frame();
  check_poll_set();
}
