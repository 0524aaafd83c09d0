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
// A frame carries a tag (sealer.h), so that nobody without the keys makes this rank wait for, expect or combine what
// its peer did not send. So does every stripe of a payload if the link or the call says so; with secrecy it is
// encrypted. Stripes are opened where they lie, and count as received only then. A message's ticket and a stripe's
// number are what it is sealed for.
//
// Payloads are received straight into their destination. Only what happens to follow a frame in the same read, up to
// 4 KiB, is copied once more: it makes a small message cost one system call.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "connection.h"
#include "frame.h"
#include "link.h"
#include "message_queue.h"
#include "sealer.h"

struct iovec;

namespace ronde {

class TcpLink final : public Link {
 public:
  // `streams`: at least one, all with keys; the same number in the same order as the peer. Makes them non-blocking and
  // switches Nagle's algorithm off. `peer_host` is for messages to people. `seals_payload`: also that carries tags.
  TcpLink(int peer, int own, std::string peer_host, std::vector<Connection> streams, bool seals_payload = false);

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

  // A stripe of a message's payload, and how much of it and its tag has moved.
  struct Stripe {
    size_t number;
    size_t begin;
    size_t bytes;
    size_t done;
  };

  // The last stripe that a stream has sealed; with secrecy `text` is what travels.
  struct Sealed {
    Ticket ticket = 0;
    size_t number = 0;
    Tag tag;
    std::vector<std::byte> text;
  };

  struct Stream {
    explicit Stream(Connection connection);

    int fd() const { return socket.get(); }

    Descriptor socket;
    Sealer outgoing;
    Sealer incoming;
    Cursor out;
    Cursor in;
    Sealed sealed;
    Tag arriving;  // of the stripe at `in`
  };

  // Where a stripe's bytes and its tag travel from or to.
  struct Place {
    std::byte* bytes;
    std::byte* tag;
  };

  bool is_sealed(const Message& message) const { return seals_payload_ || message.frame.call.is_sealed; }
  size_t tag_bytes(const Message& message) const { return is_sealed(message) ? kTagBytes : 0; }
  size_t share(const Message& message, size_t stream) const;
  Stripe stripe_at(const Message& message, size_t stream, size_t done) const;
  Place seal(Stream& stream, const Message& message, Ticket ticket, const Stripe& stripe) const;
  void settle(const MessageQueue& queue, size_t stream, Cursor& cursor) const;
  void advance(MessageQueue& queue, size_t stream, Cursor& cursor, size_t bytes) const;
  Ticket push(MessageQueue& queue, const Call& call, void* data, size_t bytes) const;
  template <class Find>
  size_t list_pieces(MessageQueue& queue, size_t stream, Cursor cursor, Ticket last, iovec* pieces, Find&& find) const;
  size_t list_outgoing(size_t stream, iovec* pieces);
  size_t list_incoming(size_t stream, iovec* pieces);

  bool send_some(size_t stream);
  bool receive_some(size_t stream);
  void accept(size_t stream, size_t bytes);
  bool take_staged();
  void take_frame(const std::byte* bytes, Ticket ticket);
  bool receive_wanted(size_t stream) const;
  Failure broken(int error) const;

  Ends ends_;
  bool seals_payload_;
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
