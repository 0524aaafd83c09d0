// A link over one or several connected sockets ("streams"), normally TCP.
//
// On the wire: the frame of a message goes down stream 0, its payload follows in stripes dealt round robin, stripe i
// down stream i mod streams. Each stream carries its share of the messages in their order. So a message of at most one
// stripe is one piece of stream 0, right behind its frame; and a large one fills from the front on all streams at once,
// which lets the receiver reduce what has arrived.
//
// Stream 0 runs ahead: the others wait with their part of a message until stream 0 has brought its frame and the frame
// has been checked.
//
// Payloads are received straight into their destination. Only what happens to follow a frame in the same read, up to
// 4 KiB, is copied once more: it makes a small message cost one system call.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "frame.h"
#include "link.h"
#include "message_queue.h"

struct iovec;

namespace ronde {

class TcpLink final : public Link {
 public:
  // Takes ownership of the connected sockets `streams` (at least one; the same number in the same order as the peer),
  // makes them non-blocking and switches Nagle's algorithm off. `peer_host` is for messages to people.
  TcpLink(int peer, int own, std::string peer_host, std::vector<int> streams);
  ~TcpLink() override;

  Ticket send(const Call& call, const void* data, size_t bytes) override;
  Ticket recv(const Call& call, void* data, size_t bytes) override;
  Ticket sent() const override { return outgoing_.finished(); }
  Ticket received() const override { return incoming_.finished(); }
  bool progress() override;
  bool pending() const override { return !outgoing_.empty() || !incoming_.empty(); }
  void add_poll(std::vector<pollfd>& fds) const override;
  void abandon() override;

 private:
  static constexpr size_t kStagingBytes = 4096;

  // Where a stream is in the messages of one direction.
  struct Cursor {
    Ticket ticket = 1;
    size_t done = 0;  // bytes of that message moved on this stream, the frame included
  };

  struct Stream {
    int fd;
    Cursor out;
    Cursor in;
  };

  size_t share(const Message& message, size_t stream) const;
  size_t position(size_t stream, size_t share_offset) const;
  void settle(const MessageQueue& queue, size_t stream, Cursor& cursor) const;
  void advance(MessageQueue& queue, size_t stream, Cursor& cursor, size_t bytes) const;
  size_t list_pieces(MessageQueue& queue, size_t stream, Cursor cursor, Ticket last, iovec* pieces, size_t limit) const;

  bool send_some(size_t stream);
  bool receive_some(size_t stream);
  bool take_staged();
  bool receive_wanted(size_t stream) const;
  Failure broken(int error) const;

  Ends ends_;
  size_t stripe_bytes_;
  std::vector<Stream> streams_;
  MessageQueue outgoing_;
  MessageQueue incoming_;
  Ticket checked_ = 0;  // the last incoming message whose frame has come and fits
  // Bytes of stream 0 that were read together with a frame: staging_[staged_begin_, staged_end_).
  std::array<std::byte, kStagingBytes> staging_;
  size_t staged_begin_ = 0;
  size_t staged_end_ = 0;
};

}  // namespace ronde
