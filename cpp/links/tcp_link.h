// A link over one or several connected sockets ("streams"), normally TCP.
//
// On the wire: the frame of a message travels on stream 0. Its payload follows in stripes, round robin: stripe i
// travels on stream i mod streams. Each stream carries its stripes in the order of the messages. So a message of at
// most one stripe follows its frame on stream 0 in one piece. A large message arrives from its beginning on all streams
// at once, which lets the receiver reduce the part that has arrived.
//
// Stream 0 is ahead: the receiver reads the other streams' part of a message only after it has received and checked the
// frame on stream 0.
//
// A frame carries a tag (sealer.h), so that an attacker without the keys cannot make this rank wait for, expect or
// combine bytes that its peer did not send. Every stripe of a payload carries one, too, if the link's option or the
// call requires it; with encryption the stripe is also encrypted. The receiver opens stripes in place, and they count
// as received only then. A stripe's position for sealing is its message's ticket and its number.
//
// Payloads are received directly into their destination. Only bytes that follow a frame in the same read, up to 4 KiB,
// are copied once more; in return a small message costs one system call. A wait begins with poll(2), and then only
// streams that it reports are read: among many ranks most have nothing.
#pragma once

#include <array>
#include <span>
#include <string>
#include <vector>

#include "links/connection.h"
#include "links/frame.h"
#include "links/link.h"
#include "links/message_queue.h"
#include "links/sealer.h"

struct iovec;

namespace ronde {

class TcpLink final : public Link {
 public:
  // `streams`: at least one, all with keys, in the same number and order as the peer's. The constructor makes them
  // non-blocking and disables Nagle's algorithm. `peer_host`: for errors. `seals_payload`: payload carries tags, too.
  TcpLink(int peer, int own, std::string peer_host, std::vector<Connection> streams, bool seals_payload = false);

  Ticket send(const Call& call, const void* data, size_t bytes) override;
  Ticket recv(const Call& call, void* data, size_t bytes) override;
  Ticket sent() const override { return outgoing_.finished(); }
  Ticket received() const override { return incoming_.finished(); }
  bool progress() override;
  bool pending() const override { return !outgoing_.empty() || !incoming_.empty(); }
  bool has_end_of_file() const override { return true; }
  void add_poll(std::vector<pollfd>& fds) const override;
  size_t take_poll(std::span<const pollfd> fds) override;
  void abandon() override;

 private:
  static constexpr size_t kStagingBytes = 4096;

  // A stream's position in the messages of one direction.
  struct Cursor {
    Ticket ticket = 1;
    size_t done = 0;  // bytes of that message moved on this stream, including the frame
  };

  // A stripe of a message's payload, and the bytes of it and its tag that have moved.
  struct Stripe {
    size_t number;
    size_t begin;
    size_t bytes;
    size_t done;
  };

  // The last stripe that a stream has sealed. With encryption `text` is sent.
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
    // A call for this direction is worth making. A call that moves less than it was asked to, or nothing, has found the
    // socket empty or full: then only poll(2) sets it again. A new socket has room and is empty.
    bool is_readable = false;
    bool is_writable = true;
    Sealed sealed;
    Tag arriving;  // the tag of the stripe at `in`
  };

  // The memory of a stripe's bytes and of its tag.
  struct Place {
    std::byte* bytes;
    std::byte* tag;
  };

  bool is_sealed(const Message& message) const { return seals_payload_ || message.frame.call.is_sealed; }
  size_t tag_bytes(const Message& message) const { return is_sealed(message) ? kTagBytes : 0; }
  size_t bytes_on(const Message& message, size_t stream) const;
  Stripe stripe_at(const Message& message, size_t stream, size_t done) const;
  Place seal(Stream& stream, const Message& message, Ticket ticket, const Stripe& stripe) const;
  void skip_finished(const MessageQueue& queue, size_t stream, Cursor& cursor) const;
  void advance(MessageQueue& queue, size_t stream, Cursor& cursor, size_t bytes) const;
  Ticket push(MessageQueue& queue, const Call& call, void* data, size_t bytes) const;
  template <class Find>
  size_t list_pieces(MessageQueue& queue, size_t stream, Cursor cursor, Ticket last, iovec* pieces, Find&& find) const;
  size_t list_outgoing(size_t stream, iovec* pieces);
  size_t list_incoming(size_t stream, iovec* pieces);

  bool send_some(size_t stream);
  bool receive_some(size_t stream);
  void accept_received(size_t stream, size_t bytes);
  bool take_staged();
  void take_frame(const std::byte* bytes, Ticket ticket);
  bool receive_wanted(size_t stream) const;
  Failure broken(int error) const;

  Ends ends_;
  bool seals_payload_;
  std::vector<Stream> streams_;
  MessageQueue outgoing_;
  MessageQueue incoming_;
  Ticket checked_ = 0;  // the last incoming message whose frame has been received and checked
  // Bytes of stream 0 that were read together with a frame: staging_[staged_begin_, staged_end_).
  std::array<std::byte, kStagingBytes> staging_;
  size_t staged_begin_ = 0;
  size_t staged_end_ = 0;
};

}  // namespace ronde
