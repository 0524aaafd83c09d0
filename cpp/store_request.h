// One request to the server of a store and its answer, over a connected stream socket; ronde/net/stores/wire.py has the
// frames. A client of a store does little else, so with many of them this is what their host's cores are busy with.
// The server reads the frames of requests here, too.
//
// Between hosts a frame ends with a tag (sealer.h), which its length includes. The length itself travels readable, so
// that a reader knows how much to wait for; it is bounded before anything is allocated, and covered by the tag.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "function_ref.h"
#include "sealer.h"

namespace ronde {

// The connection is of no use any more: the answer could be taken for that to a later request.
struct StoreConnectionError {
  int error;  // of errno; 0: the answer is malformed; EBADMSG: it is not what the other end has sent
};

struct StoreRequest {
  uint8_t operation = 0;
  uint64_t number = 0;
  uint64_t timeout_ns = 0;  // that the server may wait for what is asked for
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
// SO_RCVTIMEO and SO_SNDTIMEO set, which say how often to look at the clock. Calls `interrupted` when a signal has
// come, and throws Interrupted if that returns true, StoreConnectionError if the connection breaks or the time is over.
// `seals`: of the connection; null if its messages have no tags.
void ask_store(int fd, const StoreRequest& request, uint64_t patience_ns, StoreAnswer& answer,
               FunctionRef<bool()> interrupted, SealedConnection* seals = nullptr);

// The request in the frame, with views into it; nothing if the frame is not whole, is followed by something else, or
// its tag does not fit: then it is as before.
std::optional<StoreRequest> read_request(std::span<char> frame, SealedConnection* seals = nullptr);

// The frame as it travels with a tag: with its length changed and the tag behind.
std::string sealed_frame(std::string_view frame, SealedConnection& seals);

}  // namespace ronde
