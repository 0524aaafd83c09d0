// A watch's reaction to a peer: messages in pieces, a death in the middle of one, and malformed messages. The test is
// the peer at the other end of a socket.
#include "failures/watch.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "connection_keys.h"
#include "failures/watch_message.h"
#include "rank_threads.h"

namespace ronde {
namespace {

// Rank 0 of three; the test is ranks 1 and 2 at the other ends.
class Watched {
 public:
  explicit Watched(bool seals = false) {
    std::map<int, Connection> controls;
    for (int rank : {1, 2}) {
      int ends[2];
      CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
      controls.emplace(rank, Descriptor(ends[0]));
      if (seals) controls[rank].keys = testing::keys_of_end(0);
      peers_[rank] = Descriptor(ends[1]);
    }
    const std::vector<std::string> names = {"rank 0 on a", "rank 1 on b", "rank 2 on c"};
    const auto connections = std::make_shared<SharedConnections>(std::move(controls));
    watch_ = std::make_unique<Watch>(0, names, connections, 0, std::vector<int>{0, 1, 2});
    watch_->set_bell(BellHandle(&bell_));
  }

  void send(const void* data, size_t bytes) {
    CHECK(write(peers_[1].get(), data, bytes) == static_cast<ssize_t>(bytes));
  }
  void end() { peers_[1].reset(); }
  Watch& watch() { return *watch_; }
  Failure failure() {
    while (!watch_->failure().failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return watch_->failure().failure();
  }
  // The message that rank 2 receives, which announces a failure.
  WatchMessage next_announced() {
    WatchMessage message;
    CHECK(recv(peers_[2].get(), &message, sizeof(message), MSG_WAITALL) == sizeof(message));
    return message;
  }

 private:
  Bell bell_;
  std::map<int, Descriptor> peers_;
  std::unique_ptr<Watch> watch_;
};

bool contains(const std::string& text, const char* words) {
  if (text.find(words) != std::string::npos) return true;
  std::fprintf(stderr, "\"%s\" lacks \"%s\"\n", text.c_str(), words);
  return false;
}

WatchMessage message_of(WatchMessage::Type type) {
  WatchMessage message;
  message.type = type;
  return message;
}

WatchMessage failure_message() {
  WatchMessage message = message_of(WatchMessage::Type::kFailure);
  message.failure_kind = static_cast<int32_t>(FailureKind::kTimeout);
  message.missing_count = 2;
  message.missing[1] = 2;
  message.set_reason("waited");
  return message;
}

// Each message has one wrong field: its sender counts as lost, and the others learn the reason.
void test_malformed_messages() {
  using Type = WatchMessage::Type;
  struct Case {
    Type type;
    std::function<void(WatchMessage&)> spoil;
    const char* text;
  };
  const std::vector<Case> cases = {
      {Type::kNote, [](auto& m) { m.magic ^= 1; }, "not a control message"},
      {Type::kNote, [](auto& m) { m.type = static_cast<Type>(77); }, "unknown type"},
      {Type::kNote, [](auto& m) { m.missing_count = -1; }, "too many words"},
      {Type::kNote, [](auto& m) { m.missing_count = WatchMessage::kNoteWords + 1; }, "too many words"},
      {Type::kNote, [](auto& m) { m.rank = 5; }, "unknown channel"},
      {Type::kNote, [](auto& m) { m.rank = -1; }, "unknown channel"},
      {Type::kGoodbye, [](auto& m) { m.calls_made = UINT64_MAX; }, "goodbye"},
      {Type::kLongCall, [](auto& m) { m.rank = 3; }, "rank that does not exist"},
      {Type::kLongCall, [](auto& m) { m.rank = INT32_MIN; }, "rank that does not exist"},
      {Type::kLongCall, [](auto& m) { m.call.kind = static_cast<Kind>(200); }, "unknown kind"},
      {Type::kLongCall, [](auto& m) { m.call.dtype = static_cast<DType>(15); }, "unknown kind"},
      {Type::kFailure, [](auto& m) { m.failure_kind = 9; }, "unknown kind"},
      {Type::kFailure, [](auto& m) { m.failure_kind = 0; }, "unknown kind"},
      {Type::kFailure, [](auto& m) { m.rank = 3; }, "rank that does not exist"},
      {Type::kFailure, [](auto& m) { m.missing_count = 17; }, "too many missing ranks"},
      {Type::kFailure, [](auto& m) { m.missing[0] = -4; }, "missing rank that does not exist"},
      {Type::kFailure, [](auto& m) { std::memset(m.reason, 'x', sizeof(m.reason)); }, "does not end"},
  };
  for (const Case& each : cases) {
    WatchMessage message = each.type == Type::kFailure ? failure_message() : message_of(each.type);
    if (each.type == Type::kNote) message.rank = 0;
    each.spoil(message);
    Watched watched;
    watched.send(&message, sizeof(message));
    const Failure failure = watched.failure();
    CHECK(failure.kind == FailureKind::kPeerLost && failure.rank == 1);
    CHECK(contains(failure.what(), "rank 1 on b sent ") && contains(failure.what(), each.text));
    const WatchMessage announced = watched.next_announced();
    CHECK(announced.type == Type::kFailure && announced.rank == 1 && contains(announced.reason, each.text));
  }
}

void test_an_announced_failure() {
  WatchMessage message = failure_message();
  message.set_reason("caf\xc3\xa9 \xff\x1b[31m \xe2\x82");
  std::memcpy(message.reason + std::strlen(message.reason), "\xc3\n\x9f", 4);
  Watched watched;
  for (const char& byte : std::string_view(reinterpret_cast<const char*>(&message), sizeof(message))) {
    watched.send(&byte, 1);
  }
  const Failure failure = watched.failure();
  CHECK(failure.kind == FailureKind::kTimeout && failure.missing == std::vector<int>({0, 2}));
  CHECK(failure.what() == std::string("caf\xc3\xa9 ??[31m ???\n?"));
}

// A text that is too long ends with a whole character.
void test_a_long_reason() {
  WatchMessage message = failure_message();
  const std::string text(sizeof(WatchMessage::reason) - 2, 'x');
  message.set_reason(text + "\xc3\xa9y");
  CHECK(message.reason_text() == text);
}

void test_a_death_in_the_middle_of_a_message() {
  for (const size_t bytes : {0, 1, 100, 519}) {
    Watched watched;
    const WatchMessage message = failure_message();
    watched.send(&message, bytes);
    watched.end();
    const Failure failure = watched.failure();
    CHECK(failure.kind == FailureKind::kPeerLost && failure.rank == 1);
    CHECK(contains(failure.what(), "rank 1 on b was lost: its process ended without shutting down"));
  }
}

// poll() refuses more descriptors than the soft limit: a watch that cannot poll fails its communicator and says why.
void test_a_watch_that_cannot_poll() {
  rlimit limit{};
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  Watched watched;
  const rlimit lower{1, limit.rlim_max};
  CHECK(setrlimit(RLIMIT_NOFILE, &lower) == 0);
  const WatchMessage goodbye = message_of(WatchMessage::Type::kGoodbye);
  watched.send(&goodbye, sizeof(goodbye));  // wakes it
  const Failure failure = watched.failure();
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  CHECK(failure.kind == FailureKind::kAborted && failure.rank == 0);
  CHECK(contains(failure.what(), "rank 0 on a cannot watch the other ranks any more: poll: Invalid argument"));
}

// Between hosts a message carries a tag: the watch ignores an altered or repeated message and fails.
void test_altered_messages() {
  for (const bool comes_again : {false, true}) {
    Watched watched(true);
    const WatchMessage message = failure_message();
    std::byte bytes[sizeof(message) + kTagBytes];
    std::memcpy(bytes, &message, sizeof(message));
    SealedConnection seals(testing::keys_of_end(1));
    if (comes_again) {
      WatchMessage goodbye = message_of(WatchMessage::Type::kGoodbye);
      goodbye.calls_made = 7;
      std::memcpy(bytes, &goodbye, sizeof(goodbye));
      seals.seal(bytes);
      watched.send(bytes, sizeof(bytes));
    } else {
      seals.seal(bytes);
      bytes[20] ^= std::byte{1};
    }
    watched.send(bytes, sizeof(bytes));
    const Failure failure = watched.failure();
    CHECK(failure.kind == FailureKind::kPeerLost && failure.rank == 1);
    CHECK(contains(failure.what(), "rank 1 on b was lost: what it sent was altered"));
  }
}

// Far more notes than a receive buffer holds, to a rank that is stopped for longer than the time-out of a silent host:
// the sender waits for it, and the rank gets all notes in order when it continues.
void test_a_stopped_rank_that_has_many_notes_to_read() {
  constexpr uint32_t kNotes = 3000;
  const auto [here, there] = testing::tcp_socket_pair();
  const int patience_ms = 500, buffer_bytes = 16 * 1024;
  CHECK(setsockopt(here, IPPROTO_TCP, TCP_USER_TIMEOUT, &patience_ms, sizeof(patience_ms)) == 0);
  CHECK(setsockopt(here, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof(buffer_bytes)) == 0);
  const Descriptor peer(there);
  Bell bell;
  std::map<int, Connection> controls;
  controls.emplace(1, Descriptor(here));
  Watch watch(0, {"rank 0 on a", "rank 1 on b"}, std::make_shared<SharedConnections>(std::move(controls)), 0, {0, 1});
  watch.set_bell(BellHandle(&bell));
  FailureState& failure = watch.failure();
  for (uint32_t number = 0; number < kNotes; ++number) watch.send_note(1, {&number, 1});
  std::this_thread::sleep_for(std::chrono::milliseconds(4 * patience_ms));
  if (failure.failed()) std::fprintf(stderr, "%s\n", failure.failure().what());
  CHECK(!failure.failed());
  for (uint32_t number = 0; number < kNotes; ++number) {
    WatchMessage note;
    CHECK(recv(peer.get(), &note, sizeof(note), MSG_WAITALL) == sizeof(note));
    CHECK(note.type == WatchMessage::Type::kNote && std::memcmp(note.reason, &number, sizeof(number)) == 0);
    WatchMessage read = message_of(WatchMessage::Type::kRead);
    read.calls_made = number + 1;
    CHECK(send(peer.get(), &read, sizeof(read), 0) == sizeof(read));
  }
  watch.send_goodbye(0);
  WatchMessage goodbye;
  CHECK(recv(peer.get(), &goodbye, sizeof(goodbye), MSG_WAITALL) == sizeof(goodbye));
  CHECK(goodbye.type == WatchMessage::Type::kGoodbye);
  WatchMessage read = message_of(WatchMessage::Type::kRead);
  read.calls_made = kNotes + 2;
  CHECK(send(peer.get(), &read, sizeof(read), 0) == sizeof(read));
  while (!failure.failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(contains(failure.failure().what(), "rank 1 on b sent an impossible number of messages read"));
}

// Two processes with communicators of different ranks: each communicator gets only its failure and goodbyes, a message
// for one that this process has left is dropped, and the end of the connection fails all that are still open.
void test_communicators_that_share_connections() {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  const auto connect = [](int process, int fd) {
    std::map<int, Connection> controls;
    controls.emplace(process, Descriptor(fd));
    return std::make_shared<SharedConnections>(std::move(controls));
  };
  const auto here = connect(5, ends[0]);
  auto there = connect(3, ends[1]);
  const std::vector<std::string> names = {"rank 0 on a", "rank 1 on b"};
  const auto until = [](const auto& is_so) {
    while (!is_so()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  Watch world(0, names, here, 1, {3, 5});
  auto left = std::make_unique<Watch>(0, names, here, 2, std::vector<int>{3, 5});
  Watch reversed(1, names, here, 3, {5, 3});
  CHECK_THROWS(Watch(0, names, here, 3, {3, 5}), UsageError);
  {
    Watch their_world(1, names, there, 1, {3, 5});
    Watch their_left(1, names, there, 2, {3, 5});
    Watch their_reversed(0, names, there, 3, {5, 3});
    left->send_goodbye(4);
    left.reset();
    until([&] { return their_left.has_left(0); });
    their_left.send_note(0, {});
    their_reversed.announce_failure(Failure(FailureKind::kAborted, 0, "stop"));
    until([&] { return reversed.failure().failed(); });
    CHECK(reversed.failure().failure().rank == 0 && !world.failure().failed());
    const Descriptor pipe_end(dup(0));
    their_world.send_descriptor(0, pipe_end.get());
    const Descriptor received(world.receive_descriptor(1, INT64_MAX / 2).value());
    CHECK(received.get() >= 0);
    CHECK(!world.receive_descriptor(1, 1'000'000));
    their_left.send_goodbye(0);
    their_reversed.send_goodbye(0);
    their_world.send_goodbye(2);
    until([&] { return world.has_left(1); });
    CHECK(!world.failure().failed());
  }
  Watch late(0, names, here, 4, {3, 5});
  until([&] { return late.failure().failed(); });
  CHECK(contains(late.failure().failure().what(), "rank 1 on b was lost: its process ended without shutting down"));
  CHECK(!world.failure().failed());
  for (Watch* each : {&world, &reversed, &late}) each->send_goodbye(2);
}

// A world that is being made: its watch tells a failure to the processes that are connected by then, reads those that
// are added while its thread runs, and notices their end.
void test_connections_that_are_added() {
  std::map<int, Descriptor> peers;
  const auto connection_to = [&](int process) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    peers[process] = Descriptor(ends[1]);
    std::map<int, Connection> controls;
    controls.emplace(process, Descriptor(ends[0]));
    return controls;
  };
  const auto connections = std::make_shared<SharedConnections>(std::map<int, Connection>());
  Watch watch(0, {"rank 0 on a", "rank 1 on b", "rank 2 on c"}, connections, 0, {0, 1, 2});
  watch.announce_failure(Failure(FailureKind::kPeerLost, 2, "nobody is connected"));
  connections->add(connection_to(1));
  watch.announce_failure(Failure(FailureKind::kTimeout, -1, "waited", {2}));
  WatchMessage message;
  CHECK(recv(peers[1].get(), &message, sizeof(message), MSG_WAITALL) == sizeof(message));
  CHECK(message.reason_text() == "waited" && message.missing[0] == 2);
  connections->add(connection_to(2));
  CHECK_THROWS(connections->add(connection_to(1)), UsageError);
  WatchMessage goodbye = message_of(WatchMessage::Type::kGoodbye);
  goodbye.calls_made = 0;
  CHECK(send(peers[2].get(), &goodbye, sizeof(goodbye), 0) == sizeof(goodbye));
  while (!watch.has_left(2)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  peers[1].reset();
  while (!watch.failure().failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(watch.failure().failure().rank == 1);
  watch.stop();
  CHECK_THROWS(connections->add(connection_to(3)), UsageError);
}

// Opens files until they have taken the numbers of all closed descriptors.
std::vector<int> take_numbers(bool are_sockets, int closed) {
  std::vector<int> taken;
  while (taken.empty() || taken.back() < closed) {
    int ends[2] = {-1, -1};
    if (are_sockets) {
      CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
      taken.push_back(ends[0]);
      taken.push_back(ends[1]);
    } else {
      taken.push_back(memfd_create("test", MFD_CLOEXEC));
    }
  }
  return taken;
}

// A program closes all descriptors, and opens files that get the same numbers. The watch ends nevertheless, in a second
// because nothing wakes its thread, and leaves the files alone.
void test_descriptors_with_new_files(bool are_sockets) {
  constexpr int kClosed = 100;
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  const Descriptor peer(fcntl(ends[1], F_DUPFD_CLOEXEC, kClosed + 1));
  std::map<int, Connection> controls;
  controls.emplace(1, Descriptor(ends[0]));
  auto connections = std::make_shared<SharedConnections>(std::move(controls));
  auto watch = std::make_unique<Watch>(0, std::vector<std::string>{"rank 0 on a", "rank 1 on b"},
                                       std::move(connections), 0, std::vector<int>{0, 1});
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // its thread is in poll(2)
  for (int fd = 3; fd <= kClosed; ++fd) close(fd);
  const std::vector<int> taken = take_numbers(are_sockets, kClosed);
  watch->send_goodbye(0);
  watch.reset();
  for (const int fd : taken) {
    char byte = 0;
    const ssize_t got = are_sockets ? recv(fd, &byte, 1, MSG_DONTWAIT) : lseek(fd, 0, SEEK_END);
    CHECK(are_sockets ? got == -1 && errno == EAGAIN : got == 0);
  }
  for (const int fd : taken) CHECK(close(fd) == 0);
}

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_communicators_that_share_connections();
  ronde::test_connections_that_are_added();
  ronde::test_a_stopped_rank_that_has_many_notes_to_read();
  ronde::test_malformed_messages();
  ronde::test_an_announced_failure();
  ronde::test_a_long_reason();
  ronde::test_a_death_in_the_middle_of_a_message();
  ronde::test_a_watch_that_cannot_poll();
  ronde::test_altered_messages();
  for (const bool are_sockets : {false, true}) ronde::test_descriptors_with_new_files(are_sockets);
  return 0;
}
