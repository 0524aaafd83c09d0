// The link over sockets: the conformance suite of links, ends of connections, and altered streams.
#include "links/tcp_link.h"

#include <dlfcn.h>

#include <atomic>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "algorithms/over_links.h"
#include "link_suite.h"

namespace {

std::atomic<int> receive_calls{0};
std::atomic<int> vain_receive_calls{0};  // those that found nothing

}  // namespace

// Counts the calls of the links on their way to the C library, or to the sanitizer.
extern "C" ssize_t recvmsg(int fd, msghdr* message, int flags) {
  static const auto next = reinterpret_cast<ssize_t (*)(int, msghdr*, int)>(dlsym(RTLD_NEXT, "recvmsg"));
  const ssize_t count = next(fd, message, flags);
  ++receive_calls;
  if (count < 0) ++vain_receive_calls;
  return count;
}

using namespace ronde;
using namespace ronde::testing;

namespace {

std::vector<Connection> streams_of(int end, std::initializer_list<int> sockets, bool conceals = false) {
  std::vector<Connection> streams;
  for (const int socket : sockets) streams.emplace_back(Descriptor(socket), keys_of_end(end, conceals));
  return streams;
}

// The peer dies with half a message in flight: the waiting rank's failure names it.
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

void check_sender_notices_the_end() {
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
  TcpLink link(2, 0, "host-c", streams_of(0, {here}));
  close(there);
  int in = 0;
  link.recv(kSum10, &in, sizeof(in));
  const auto error = thrown_by<Failure>([&] {
    while (true) look_and_progress(link);
  });
  CHECK(contains(error, "rank 2 on host-c closed its connection"));
}

void check_no_frame_at_all() {
  const auto [here, there] = tcp_socket_pair();
  TcpLink link(1, 0, "host-b", streams_of(0, {here}));
  const char request[] = "GET / HTTP/1.1\r\nHost: somewhere-else\r\nAccept: everything\r\nX-More: than a frame\r\n\r\n";
  static_assert(sizeof(request) > sizeof(SealedFrame));
  CHECK(write(there, request, sizeof(request)) == sizeof(request));
  int in = 0;
  link.recv(kSum10, &in, sizeof(in));
  const auto error = thrown_by<Failure>([&] {
    while (true) look_and_progress(link);
  });
  CHECK(error.kind == FailureKind::kPeerLost && contains(error, "rank 1 on host-b was lost: what it sent was altered"));
  close(there);
}

// A frame may arrive byte by byte.
void check_slow_frame() {
  const auto [here, there] = unix_socket_pair();
  TcpLink link(1, 0, "host-b", streams_of(0, {here}));
  unsigned char message[sizeof(SealedFrame) + 4];
  const Frame frame{.call = kSum10, .bytes = 4};
  const Tag tag = Sealer(keys_of_end(1).outgoing, false).seal({1}, std::as_bytes(std::span(&frame, 1)), 0, nullptr);
  std::memcpy(message, &frame, sizeof(frame));
  std::memcpy(message + sizeof(frame), tag.data(), tag.size());
  std::memcpy(message + sizeof(SealedFrame), "abcd", 4);
  char in[4];
  link.recv(kSum10, in, 4);
  for (const unsigned char& byte : message) {
    CHECK(link.received() == 0);
    CHECK(look_and_progress(link) == false);
    CHECK(write(there, &byte, 1) == 1);
    CHECK(look_and_progress(link) == true);
  }
  CHECK(link.received() == 1 && std::memcmp(in, "abcd", 4) == 0);
  close(there);
}

// A small message costs one system call per side; the poll set contains only descriptors that can make progress.
void check_poll_set() {
  const auto [here, there] = tcp_socket_pair();
  const auto [here2, there2] = tcp_socket_pair();
  TcpLink a(1, 0, "host-b", streams_of(0, {here, here2}));
  TcpLink b(0, 1, "host-a", streams_of(1, {there, there2}));
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
  while (b.pending()) look_and_progress(b);
  CHECK(in == 5);
}

// Of many links most have nothing to receive: only those that poll(2) reports are read, each message by one call.
void check_receive_calls() {
  constexpr int kRanks = 16, kBytes = 16, kCalls = 20;
  Ranks ranks(kRanks, Wire::kTcp);
  receive_calls = vain_receive_calls = 0;
  ranks.run([&](Mesh& mesh) {
    const std::vector<size_t> sizes(kRanks, kBytes);
    std::vector<unsigned char> in(kBytes, static_cast<unsigned char>(mesh.rank())), out(kRanks * kBytes);
    for (uint64_t number = 0; number < kCalls; ++number) {
      allgatherv(mesh, Call{.sequence = number, .kind = Kind::kAllgather}, in.data(), out.data(), sizes);
      for (int i = 0; i < kRanks * kBytes; ++i) CHECK(out[i] == i / kBytes);
    }
  });
  std::printf("%d receive calls of a rank in an all-gather, of them %d in vain\n", receive_calls / kRanks / kCalls,
              vain_receive_calls / kRanks / kCalls);
  CHECK(vain_receive_calls == 0 && receive_calls <= kRanks * kCalls * (kRanks - 1));
}

// The bytes that one link sends, captured from its socket.
struct SentBytes {
  std::string bytes;

  SentBytes(const std::vector<std::string>& messages, Seals seals) {
    const auto [here, there] = unix_socket_pair();
    TcpLink link(0, 1, "host-a", streams_of(1, {here}, seals.conceals), seals.payload);
    for (const std::string& message : messages) link.send(kSum10, message.data(), message.size());
    char buffer[4096];
    while (link.pending()) {
      look_and_progress(link);
      const ssize_t got = recv(there, buffer, sizeof(buffer), MSG_DONTWAIT);
      if (got > 0) bytes.append(buffer, static_cast<size_t>(got));
    }
    close(there);
  }
};

// Whether a link that expects these messages accepts `bytes` as them. Fails the test if it accepts others.
bool accepts(const std::string& bytes, const std::vector<std::string>& expected, Seals seals) {
  const auto [here, there] = unix_socket_pair();
  TcpLink link(1, 0, "host-b", streams_of(0, {here}, seals.conceals), seals.payload);
  std::vector<std::string> in;
  for (const std::string& message : expected) in.emplace_back(message.size(), '\0');
  for (std::string& message : in) link.recv(kSum10, message.data(), message.size());
  CHECK(write(there, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  close(there);
  try {
    while (link.pending()) look_and_progress(link);
  } catch (const Failure& failure) {
    CHECK(failure.kind == FailureKind::kPeerLost && failure.rank == 1);
  }
  for (size_t i = 0; i < link.received(); ++i) CHECK(in[i] == expected[i]);
  return link.received() == expected.size();
}

// An attacker without the keys alters a stream: the link accepts only bytes that the peer has sent.
void check_altered_streams(Seals seals) {
  const std::vector<std::string> messages = {std::string(100, 'a'), "", std::string(300, 'b')};
  const std::string bytes = SentBytes(messages, seals).bytes;
  CHECK(accepts(bytes, messages, seals));
  CHECK((bytes.find("aaaa") == std::string::npos) == seals.conceals);
  const size_t frame = sizeof(SealedFrame), tag = kTagBytes;
  for (size_t byte = 0; byte < (seals.payload ? bytes.size() : frame); ++byte) {
    std::string altered = bytes;
    altered[byte] ^= 1 << byte % 8;
    CHECK(!accepts(altered, messages, seals));
  }
  if (!seals.payload) return;
  const size_t first = frame + 100 + tag;
  CHECK(!accepts(bytes.substr(0, first) + bytes, messages, seals));                       // repeated
  CHECK(!accepts(bytes.substr(first), messages, seals));                                  // omitted
  CHECK(!accepts(bytes.substr(first, frame) + bytes.substr(0, first), messages, seals));  // reordered
}

}  // namespace

int main() {
  for (const int streams : {1, 2, 3}) {
    check_link(Wire::kUnix, streams);
    check_link(Wire::kTcp, streams);
    check_link(Wire::kTcp, streams, {.payload = true});
    check_link(Wire::kTcp, streams, {.payload = true, .conceals = true});
    check_end_of_file_in_mid_message(streams);
  }
  check_sender_notices_the_end();
  check_end_of_file_between_messages();
  check_no_frame_at_all();
  check_slow_frame();
  check_poll_set();
  check_receive_calls();
  check_altered_streams({});
  check_altered_streams({.payload = true});
  check_altered_streams({.payload = true, .conceals = true});
}
