// A client's request and a server's answers: in pieces, long, missing, malformed, late; and signals.
#include "store_request.h"

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "check.h"
#include "connection_keys.h"
#include "descriptor.h"
#include "error.h"

namespace ronde {
namespace {

constexpr uint64_t kMinute = 60'000'000'000;

// A server that receives one request and then calls a function with its end of the connection.
class Server {
 public:
  explicit Server(size_t request_bytes, std::function<void(int fd, const std::string& request)> act) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    client_ = Descriptor(ends[0]);
    const timeval limit{0, 20'000};
    setsockopt(client_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    thread_ = std::thread([act = std::move(act), request_bytes, end = Descriptor(ends[1])] {
      std::string request(request_bytes, '\0');
      for (size_t have = 0; have < request_bytes;) {
        const ssize_t got = recv(end.get(), request.data() + have, request_bytes - have, 0);
        CHECK(got > 0);
        have += static_cast<size_t>(got);
      }
      act(end.get(), request);
    });
  }
  ~Server() { thread_.join(); }

  int fd() const { return client_.get(); }

 private:
  Descriptor client_;
  std::thread thread_;
};

std::string answer_of(char status, const std::string& value) {
  const size_t rest = value.size() + 1;
  std::string frame;
  for (int shift = 24; shift >= 0; shift -= 8) frame += static_cast<char>(rest >> shift);
  return frame + status + value;
}

void send_all(int fd, const std::string& data) {
  CHECK(send(fd, data.data(), data.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(data.size()));
}

const auto kNoSignals = [] { return false; };
const StoreRequest kRequest{3, 7, 0, "key", "12"};
constexpr size_t kRequestBytes = 23 + 3 + 2;

void the_frame_is_as_the_server_reads_it() {
  StoreAnswer answer;
  Server server(kRequestBytes, [](int fd, const std::string& request) {
    CHECK(request == std::string("\0\0\0\x18\x03\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0\0\0\x03key12", kRequestBytes));
    send_all(fd, answer_of(0, "45"));
  });
  ask_store(server.fd(), kRequest, kMinute, answer, kNoSignals);
  CHECK(answer.status() == 0 && answer.value() == "45");
}

void an_answer_may_come_in_pieces() {
  StoreAnswer answer;
  Server server(kRequestBytes, [](int fd, const std::string&) {
    for (const char byte : answer_of(1, "value")) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      send_all(fd, std::string(1, byte));
    }
  });
  ask_store(server.fd(), kRequest, kMinute, answer, kNoSignals);
  CHECK(answer.status() == 1 && answer.value() == "value");
}

void both_may_be_long() {
  const std::string sent(300'000, 'a');
  StoreRequest request = kRequest;
  request.argument = sent;
  StoreAnswer answer;
  Server server(kRequestBytes - 2 + sent.size(), [](int fd, const std::string& request) {
    send_all(fd, answer_of(0, request.substr(kRequestBytes - 2) + "b"));
  });
  ask_store(server.fd(), request, kMinute, answer, kNoSignals);
  CHECK(answer.value() == sent + "b");
}

void a_bad_answer_ends_the_connection(const std::string& reply, int error) {
  StoreAnswer answer;
  Server server(kRequestBytes, [&](int fd, const std::string&) { send_all(fd, reply); });
  try {
    ask_store(server.fd(), kRequest, kMinute, answer, kNoSignals);
    CHECK(false);
  } catch (const StoreConnectionError& broken) {
    CHECK(broken.error == error);
  }
}

void a_silent_server_times_out() {
  StoreAnswer answer;
  Server server(kRequestBytes, [](int fd, const std::string&) {
    char byte;
    CHECK(recv(fd, &byte, 1, 0) <= 0);  // until the client closes the connection
  });
  const uint64_t patience_ns = 50'000'000;
  try {
    ask_store(server.fd(), kRequest, patience_ns, answer, kNoSignals);
    CHECK(false);
  } catch (const StoreConnectionError& broken) {
    CHECK(broken.error == ETIMEDOUT);
  }
  shutdown(server.fd(), SHUT_RDWR);
}

void a_signal_may_end_the_wait() {
  struct sigaction action{};
  action.sa_handler = [](int) {};
  sigaction(SIGUSR1, &action, nullptr);
  StoreAnswer answer;
  Server server(kRequestBytes, [waiting = pthread_self()](int fd, const std::string&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    pthread_kill(waiting, SIGUSR1);
    char byte;
    CHECK(recv(fd, &byte, 1, 0) <= 0);
  });
  CHECK_THROWS(ask_store(server.fd(), kRequest, kMinute, answer, [] { return true; }), Interrupted);
  shutdown(server.fd(), SHUT_RDWR);
}

void a_server_reads_what_a_client_writes() {
  std::string frame("\0\0\0\x18\x03\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\x01\xff\0\x03key12", kRequestBytes);
  const auto request = read_request(frame);
  CHECK(request && request->operation == 3 && request->number == 7 && request->timeout_ns == 511);
  CHECK(request->key == "key" && request->argument == "12");
}

std::optional<StoreRequest> read_copy(std::string frame) {
  auto request = read_request(frame);
  if (request) request->key = request->argument = {};
  return request;
}

void an_incomplete_frame_is_not_read() {
  const std::string frame("\0\0\0\x18\x03\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0\0\0\x03key12", kRequestBytes);
  for (size_t size = 0; size < frame.size(); ++size) CHECK(!read_copy(frame.substr(0, size)));
  CHECK(!read_copy(frame + "more"));
  std::string long_key = frame;
  long_key[22] = 6;  // longer than the rest of the frame
  CHECK(!read_copy(long_key));
  long_key[22] = 5;
  CHECK(read_request(long_key)->argument.empty());
  CHECK(!read_copy(std::string("\xff\xff\xff\xff", 4) + frame.substr(4)));
}

void arguments_are_read_as_they_are_written() {
  for (const std::string& expected : {std::string(), std::string("old"), std::string(70'000, 'o')}) {
    const std::string argument = compared_values({expected, "new"});
    const auto read = read_compared_values(argument);
    CHECK(read && read->expected == expected && read->desired == "new");
  }
  std::string list;
  append_key(list, "a");
  append_key(list, std::string(kLongestKey, 'b'));
  std::string_view keys = list;
  CHECK(take_key(keys) == "a" && take_key(keys) == std::string(kLongestKey, 'b') && keys.empty());
}

void malformed_arguments_are_not_read() {
  const auto is_read = [](std::string_view argument) { return read_compared_values(argument).has_value(); };
  CHECK(!is_read("") && !is_read(std::string_view("\0\0\0", 3)) && !is_read(std::string_view("\0\0\0\2v", 5)));
  CHECK(is_read(std::string_view("\0\0\0\1v", 5)) && is_read(std::string_view("\0\0\0\0", 4)));
  for (const std::string_view list : {std::string_view("\0", 1), std::string_view("\0\0", 2),
                                      std::string_view("\0\0k", 3), std::string_view("\0\2k", 3)}) {
    std::string_view keys = list;
    CHECK(!take_key(keys) && keys == list);
  }
}

void only_plain_numbers_are_read() {
  CHECK(read_decimal("0") == 0 && read_decimal("-0") == 0 && read_decimal("007") == 7 && read_decimal("-12") == -12);
  CHECK(read_decimal("999999999999999999") == 999'999'999'999'999'999);
  CHECK(read_decimal("-999999999999999999") == -999'999'999'999'999'999);
  for (const std::string_view text : {"", "-", "--1", "+1", " 1", "1 ", "1_0", "1.0", "x", "1000000000000000000"}) {
    CHECK(!read_decimal(text));
  }
}

void the_head_of_an_answer_has_its_length() {
  std::string frame(kAnswerHeadBytes, '\0');
  write_answer_head(frame.data(), 1, 5);
  CHECK(frame + "value" == answer_of(1, "value"));
}

// A server that reads one sealed request and sends a sealed answer, which `alter` may change.
void ask_sealed(bool conceals, size_t value_bytes, const std::function<void(std::string&)>& alter,
                StoreAnswer& answer) {
  const std::string value(value_bytes, 'v');
  StoreRequest request = kRequest;
  request.argument = value;
  SealedConnection seals(testing::keys_of_end(0, conceals));
  Server server(kRequestBytes - 2 + value.size() + kTagBytes, [&](int fd, std::string frame) {
    SealedConnection theirs(testing::keys_of_end(1, conceals));
    CHECK((frame.find("key") == std::string::npos) == conceals);
    std::string altered = frame;
    altered[10] ^= 1;
    CHECK(!read_request(altered, &theirs));
    const auto read = read_request(frame, &theirs);
    CHECK(read && read->key == "key" && read->argument == value && read->number == 7);
    CHECK(!read_request(frame, &theirs));
    std::string reply = sealed_frame(answer_of(1, value), theirs);
    alter(reply);
    send_all(fd, reply);
  });
  ask_store(server.fd(), request, kMinute, answer, kNoSignals, &seals);
}

void sealed_requests_and_answers_arrive() {
  for (const bool conceals : {false, true}) {
    for (const size_t bytes : {0, 2, 4055, 4056, 5000, 100'000}) {
      StoreAnswer answer;
      ask_sealed(conceals, bytes, [](std::string&) {}, answer);
      CHECK(answer.status() == 1 && answer.value() == std::string(bytes, 'v'));
    }
  }
}

void an_altered_answer_is_no_answer() {
  for (const bool conceals : {false, true}) {
    for (const size_t bytes : {3, 5000}) {
      try {
        StoreAnswer answer;
        ask_sealed(conceals, bytes, [](std::string& reply) { reply[6] ^= 4; }, answer);
        CHECK(false);
      } catch (const StoreConnectionError& broken) {
        CHECK(broken.error == EBADMSG);
      }
    }
  }
}

}  // namespace
}  // namespace ronde

int main() {
  using namespace ronde;
  the_frame_is_as_the_server_reads_it();
  an_answer_may_come_in_pieces();
  both_may_be_long();
  a_bad_answer_ends_the_connection("", ECONNRESET);
  a_bad_answer_ends_the_connection(answer_of(0, "all of it").substr(0, 8), ECONNRESET);
  a_bad_answer_ends_the_connection(std::string("\0\0\0\0\0", 5), 0);
  a_bad_answer_ends_the_connection(std::string("\xff\xff\xff\xff\0", 5), 0);
  a_bad_answer_ends_the_connection(answer_of(0, "") + "more", 0);
  a_silent_server_times_out();
  a_signal_may_end_the_wait();
  a_server_reads_what_a_client_writes();
  an_incomplete_frame_is_not_read();
  arguments_are_read_as_they_are_written();
  malformed_arguments_are_not_read();
  only_plain_numbers_are_read();
  the_head_of_an_answer_has_its_length();
  sealed_requests_and_answers_arrive();
  an_altered_answer_is_no_answer();
}
