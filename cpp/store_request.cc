#include "store_request.h"

#include <sys/socket.h>
#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <vector>

#include "error.h"

namespace ronde {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kLengthBytes = 4;
constexpr size_t kHeadBytes = kLengthBytes + 1 + 8 + 8 + 2;
constexpr size_t kAnswerBytes = kLengthBytes + 1;
constexpr size_t kLongestAnswer = size_t{128} << 20;

template <class Number>
char* put(char* place, Number number) {  // the most significant byte first
  for (int shift = 8 * (sizeof(Number) - 1); shift >= 0; shift -= 8) *place++ = static_cast<char>(number >> shift);
  return place;
}

template <class Number>
Number take(const char*& place) {
  Number number = 0;
  for (size_t i = 0; i < sizeof(Number); ++i) {
    number = static_cast<Number>(number << 8 | static_cast<unsigned char>(*place++));
  }
  return number;
}

void write_frame(char* place, const StoreRequest& request, size_t length) {
  place = put(place, static_cast<uint32_t>(length - kLengthBytes));
  place = put(place, request.operation);
  place = put(place, request.number);
  place = put(place, request.timeout_ns);
  place = put(place, static_cast<uint16_t>(request.key.size()));
  std::memcpy(place, request.key.data(), request.key.size());
  std::memcpy(place + request.key.size(), request.argument.data(), request.argument.size());
}

// One exchange: knows when it began, and so when a socket that has been silent for its own time limit is given up.
class Exchange {
 public:
  Exchange(int fd, uint64_t limit_ns, FunctionRef<bool()> interrupted)
      : fd_(fd), limit_ns_(limit_ns), interrupted_(interrupted) {}

  void send(const char* data, size_t size) {
    while (size > 0) {
      const ssize_t sent = ::send(fd_, data, size, MSG_NOSIGNAL);
      if (sent < 0) {
        consider(errno);
        continue;
      }
      data += sent;
      size -= static_cast<size_t>(sent);
    }
  }

  // Receives at least one byte.
  size_t receive(char* place, size_t size) {
    while (true) {
      const ssize_t received = recv(fd_, place, size, 0);
      if (received > 0) return static_cast<size_t>(received);
      consider(received == 0 ? ECONNRESET : errno);
    }
  }

 private:
  void consider(int error) {
    const bool is_silent = error == EAGAIN || error == EWOULDBLOCK;
    if (error != EINTR && !is_silent) throw StoreConnectionError{error};
    // A signal that came just before the call interrupted nothing: look for it after a silence, too.
    if (interrupted_()) throw Interrupted("interrupted by a signal");
    const auto waited_ns = static_cast<uint64_t>((Clock::now() - began_).count());
    if (is_silent && waited_ns >= limit_ns_) throw StoreConnectionError{ETIMEDOUT};
  }

  const int fd_;
  const uint64_t limit_ns_;
  const FunctionRef<bool()> interrupted_;
  const Clock::time_point began_ = Clock::now();
};

}  // namespace

void ask_store(int fd, const StoreRequest& request, uint64_t patience_ns, StoreAnswer& answer,
               FunctionRef<bool()> interrupted) {
  const uint64_t forever = static_cast<uint64_t>(INT64_MAX);
  Exchange exchange(fd, std::min(forever, request.timeout_ns + patience_ns), interrupted);

  const size_t length = kHeadBytes + request.key.size() + request.argument.size();
  // A length that its field cannot hold would make the rest of the request another one.
  if (request.key.size() > UINT16_MAX || length - kLengthBytes > UINT32_MAX) throw StoreConnectionError{EMSGSIZE};
  std::vector<char> long_frame(length <= StoreAnswer::kShort ? 0 : length);
  char* const frame = long_frame.empty() ? answer.bytes_ : long_frame.data();  // nothing is received before it is sent
  write_frame(frame, request, length);
  exchange.send(frame, length);

  char* const head = answer.bytes_;
  size_t received = 0;
  while (received < kAnswerBytes) received += exchange.receive(head + received, StoreAnswer::kShort - received);
  const char* place = head;
  const size_t rest = take<uint32_t>(place);
  const size_t total = kLengthBytes + rest;
  if (rest == 0 || total > kLongestAnswer || total < received) throw StoreConnectionError{0};
  answer.status_ = static_cast<unsigned char>(head[kLengthBytes]);
  answer.begin_ = kAnswerBytes;
  answer.size_ = total - kAnswerBytes;
  if (total <= StoreAnswer::kShort) {
    while (received < total) received += exchange.receive(head + received, total - received);
    return;
  }
  answer.long_value_.assign(head + kAnswerBytes, received - kAnswerBytes);
  answer.long_value_.resize(answer.size_);
  for (size_t have = received - kAnswerBytes; have < answer.size_;) {
    have += exchange.receive(answer.long_value_.data() + have, answer.size_ - have);
  }
}

std::optional<StoreRequest> read_request(std::string_view frame) {
  if (frame.size() < kHeadBytes) return std::nullopt;
  const char* place = frame.data();
  if (take<uint32_t>(place) != frame.size() - kLengthBytes) return std::nullopt;
  StoreRequest request;
  request.operation = take<uint8_t>(place);
  request.number = take<uint64_t>(place);
  request.timeout_ns = take<uint64_t>(place);
  const size_t key_bytes = take<uint16_t>(place);
  if (key_bytes > frame.size() - kHeadBytes) return std::nullopt;
  request.key = frame.substr(kHeadBytes, key_bytes);
  request.argument = frame.substr(kHeadBytes + key_bytes);
  return request;
}

}  // namespace ronde
