#include "store_request.h"

#include <sys/socket.h>
#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "error.h"
#include "steady_clock.h"

namespace ronde {
namespace {

constexpr size_t kLengthBytes = 4;
constexpr size_t kHeadBytes = kLengthBytes + 1 + 8 + 8 + 2;
static_assert(kAnswerHeadBytes == kLengthBytes + 1);
constexpr size_t kLongestAnswer = size_t{128} << 20;
constexpr size_t kMostDigits = 18;

template <class Number>
char* write_number(char* place, Number number) {  // the most significant byte first
  for (int shift = 8 * (sizeof(Number) - 1); shift >= 0; shift -= 8) *place++ = static_cast<char>(number >> shift);
  return place;
}

template <class Number>
Number read_number(const char*& place) {
  Number number = 0;
  for (size_t i = 0; i < sizeof(Number); ++i) {
    number = static_cast<Number>(number << 8 | static_cast<unsigned char>(*place++));
  }
  return number;
}

// `length`: of the whole frame, with its tag.
void write_frame(char* place, const StoreRequest& request, size_t length) {
  place = write_number(place, static_cast<uint32_t>(length - kLengthBytes));
  place = write_number(place, request.operation);
  place = write_number(place, request.number);
  place = write_number(place, request.timeout_ns);
  place = write_number(place, static_cast<uint16_t>(request.key.size()));
  std::memcpy(place, request.key.data(), request.key.size());
  std::memcpy(place + request.key.size(), request.argument.data(), request.argument.size());
}

// One exchange, with its time limit. A socket call that times out (SO_RCVTIMEO) is repeated until that limit is over.
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
    // A signal just before the call interrupts nothing, so check for it after a time-out, too.
    if (interrupted_()) throw Interrupted("interrupted by a signal");
    const auto waited_ns = static_cast<uint64_t>(steady_now_ns() - began_ns_);
    if (is_silent && waited_ns >= limit_ns_) throw StoreConnectionError{ETIMEDOUT};
  }

  const int fd_;
  const uint64_t limit_ns_;
  const FunctionRef<bool()> interrupted_;
  const int64_t began_ns_ = steady_now_ns();
};

}  // namespace

void ask_store(int fd, const StoreRequest& request, uint64_t patience_ns, StoreAnswer& answer,
               FunctionRef<bool()> interrupted, SealedConnection* seals) {
  const uint64_t forever = static_cast<uint64_t>(INT64_MAX);
  Exchange exchange(fd, std::min(forever, request.timeout_ns + patience_ns), interrupted);
  const size_t tag_bytes = seals == nullptr ? 0 : kTagBytes;

  const size_t length = kHeadBytes + request.key.size() + request.argument.size() + tag_bytes;
  // If its field could not hold the length, the server would take the rest of this request for another.
  if (request.key.size() > UINT16_MAX || length - kLengthBytes > UINT32_MAX) throw StoreConnectionError{EMSGSIZE};
  std::vector<char> long_request(length <= StoreAnswer::kShort ? 0 : length);
  // The answer's memory is free until the request is sent.
  char* const sent = long_request.empty() ? answer.bytes_ : long_request.data();
  write_frame(sent, request, length);
  if (seals != nullptr) seals->seal(std::as_writable_bytes(std::span(sent, length)), kLengthBytes);
  exchange.send(sent, length);

  char* frame = answer.bytes_;
  size_t received = 0;
  while (received < kAnswerHeadBytes) received += exchange.receive(frame + received, StoreAnswer::kShort - received);
  const char* place = frame;
  const size_t rest = read_number<uint32_t>(place);
  const size_t total = kLengthBytes + rest;
  if (rest < 1 + tag_bytes || total > kLongestAnswer || total < received) throw StoreConnectionError{0};
  if (total > StoreAnswer::kShort) {
    answer.long_frame_.assign(frame, received);
    answer.long_frame_.resize(total);
    frame = answer.long_frame_.data();
  }
  while (received < total) received += exchange.receive(frame + received, total - received);
  if (seals != nullptr && !seals->open(std::as_writable_bytes(std::span(frame, total)), kLengthBytes)) {
    throw StoreConnectionError{EBADMSG};
  }
  answer.status_ = static_cast<unsigned char>(frame[kLengthBytes]);
  answer.value_ = {frame + kAnswerHeadBytes, total - kAnswerHeadBytes - tag_bytes};
}

std::optional<StoreRequest> read_request(std::span<char> frame, SealedConnection* seals) {
  const size_t tag_bytes = seals == nullptr ? 0 : kTagBytes;
  if (frame.size() < kHeadBytes + tag_bytes) return std::nullopt;
  const char* place = frame.data();
  if (read_number<uint32_t>(place) != frame.size() - kLengthBytes) return std::nullopt;
  if (seals != nullptr && !seals->open(std::as_writable_bytes(frame), kLengthBytes)) return std::nullopt;
  StoreRequest request;
  request.operation = read_number<uint8_t>(place);
  request.number = read_number<uint64_t>(place);
  request.timeout_ns = read_number<uint64_t>(place);
  const size_t key_bytes = read_number<uint16_t>(place);
  const std::string_view rest(place, frame.size() - kHeadBytes - tag_bytes);
  if (key_bytes > rest.size()) return std::nullopt;
  request.key = rest.substr(0, key_bytes);
  request.argument = rest.substr(key_bytes);
  return request;
}

std::optional<ComparedValues> read_compared_values(std::string_view argument) {
  if (argument.size() < kLengthBytes) return std::nullopt;
  const char* place = argument.data();
  const size_t expected_bytes = read_number<uint32_t>(place);
  const std::string_view values = argument.substr(kLengthBytes);
  if (expected_bytes > values.size()) return std::nullopt;
  return ComparedValues{values.substr(0, expected_bytes), values.substr(expected_bytes)};
}

std::string compared_values(const ComparedValues& values) {
  std::string argument(kLengthBytes, '\0');
  write_number(argument.data(), static_cast<uint32_t>(values.expected.size()));
  return argument.append(values.expected).append(values.desired);
}

void append_key(std::string& keys, std::string_view key) {
  char length[sizeof(uint16_t)];
  write_number(length, static_cast<uint16_t>(key.size()));
  keys.append(length, sizeof(length)).append(key);
}

std::optional<std::string_view> take_key(std::string_view& keys) {
  if (keys.size() < sizeof(uint16_t)) return std::nullopt;
  const char* place = keys.data();
  const size_t key_bytes = read_number<uint16_t>(place);
  const std::string_view rest = keys.substr(sizeof(uint16_t));
  if (key_bytes == 0 || key_bytes > rest.size()) return std::nullopt;
  keys = rest.substr(key_bytes);
  return rest.substr(0, key_bytes);
}

std::optional<int64_t> read_decimal(std::string_view text) {
  const std::string_view digits = text.substr(text.starts_with('-') ? 1 : 0);
  if (digits.empty() || digits.size() > kMostDigits) return std::nullopt;
  int64_t number = 0;
  for (const char digit : digits) {
    if (digit < '0' || digit > '9') return std::nullopt;
    number = 10 * number + (digit - '0');
  }
  return digits.size() < text.size() ? -number : number;
}

void write_answer_head(char* place, uint8_t status, size_t value_bytes) {
  write_number(write_number(place, static_cast<uint32_t>(value_bytes + 1)), status);
}

std::string sealed_frame(std::string_view frame, SealedConnection& seals) {
  std::string sealed(frame.size() + kTagBytes, '\0');
  std::copy(frame.begin(), frame.end(), sealed.begin());
  write_number(sealed.data(), static_cast<uint32_t>(sealed.size() - kLengthBytes));
  seals.seal(std::as_writable_bytes(std::span(sealed)), kLengthBytes);
  return sealed;
}

}  // namespace ronde
