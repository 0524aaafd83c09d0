// One request to the server of a store and its answer, over a connected stream socket; ronde/stores/wire.py defines
// the frames. It is native code because a client of a store does little else, and many clients share their host's
// cores. The server parses requests here, too.
//
// Between hosts a frame ends with a tag (sealer.h), which its length includes. The length stays readable, so that a
// reader knows how many bytes to wait for. It is bounded before any allocation, and the tag covers it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "function_ref.h"
#include "sealer.h"

namespace ronde {

constexpr size_t kLongestKey = 1024;               // KEY_LIMIT_BYTES of base.py
constexpr size_t kLongestValue = size_t{1} << 20;  // VALUE_LIMIT_BYTES

// The connection is unusable: a late answer could be taken for the answer to a later request.
struct StoreConnectionError {
  int error;  // an errno; 0: the answer is malformed; EBADMSG: its tag does not match
};

// The operations that native code distinguishes; wire.py has all of them.
enum class StoreOperation : uint8_t { kSet = 1, kGet = 2, kWait = 3, kAdd = 4, kCompareSet = 5 };

struct StoreRequest {
  uint8_t operation = 0;
  uint64_t number = 0;
  uint64_t timeout_ns = 0;  // how long the server may wait for the key
  std::string_view key;
  std::string_view argument;
};

class StoreAnswer {
 public:
  int status() const { return status_; }
  std::string_view value() const { return value_; }

 private:
  friend void ask_store(int, const StoreRequest&, uint64_t, StoreAnswer&, FunctionRef<bool()>, SealedConnection*);
  static constexpr size_t kShort = 4096;

  int status_ = 0;
  std::string_view value_;
  std::string long_frame_;
  char bytes_[kShort];
};

// Sends the request and waits for the answer, for `patience_ns` beyond the request's timeout. The socket must have
// SO_RCVTIMEO and SO_SNDTIMEO set, which determine how often it checks the clock. Calls `interrupted` after a signal
// and throws Interrupted if that returns true. Throws StoreConnectionError if the connection breaks or the time is
// over. `seals`: the connection's; null if its messages have no tags.
void ask_store(int fd, const StoreRequest& request, uint64_t patience_ns, StoreAnswer& answer,
               FunctionRef<bool()> interrupted, SealedConnection* seals = nullptr);

// The request in the frame, with views into it. Returns nothing, and leaves the frame unchanged, if the frame is
// incomplete, more bytes follow it, or its tag does not match.
std::optional<StoreRequest> read_request(std::span<char> frame, SealedConnection* seals = nullptr);

// The two values in the argument of a COMPARE_SET.
struct ComparedValues {
  std::string_view expected;
  std::string_view desired;
};
std::optional<ComparedValues> read_compared_values(std::string_view argument);

std::string compared_values(const ComparedValues& values);

// Appends a key to a list of keys, as in the argument of a WAIT. The key has at most kLongestKey bytes.
void append_key(std::string& keys, std::string_view key);

// Removes the first key from a list of keys, and returns it. Returns nothing if the list is malformed; then it is
// unchanged.
std::optional<std::string_view> take_key(std::string_view& keys);

// The number in decimal digits, with a minus sign or without. Returns nothing if it has more than 18 digits, so the sum
// of two such numbers cannot overflow.
std::optional<int64_t> read_decimal(std::string_view text);

// The first bytes of an answer's frame, before the value.
constexpr size_t kAnswerHeadBytes = 4 + 1;
void write_answer_head(char* place, uint8_t status, size_t value_bytes);

// The frame with its tag behind it and its length changed accordingly.
std::string sealed_frame(std::string_view frame, SealedConnection& seals);

}  // namespace ronde
