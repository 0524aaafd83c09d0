#include "links/tcp_link.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <system_error>
#include <utility>

namespace ronde {
namespace {

// Small enough to spread an algorithm's segment over several streams, large enough not to reduce throughput.
constexpr size_t kStripeBytes = 128 << 10;
// Bytes per system call: far more than a socket buffer holds, far less than the kernel's limit of 2^31.
constexpr size_t kCallBytes = 16 << 20;
constexpr size_t kMaxPieces = 64;

constexpr size_t kFrameBytes = sizeof(SealedFrame);

// The bytes of a frame on this stream.
size_t frame_bytes_on(size_t stream) { return stream == 0 ? kFrameBytes : 0; }

// The bytes that a call asks for.
size_t bytes_of(const msghdr& header) {
  size_t bytes = 0;
  for (size_t i = 0; i < header.msg_iovlen; ++i) bytes += header.msg_iov[i].iov_len;
  return bytes;
}

}  // namespace

TcpLink::Stream::Stream(Connection connection)
    : socket(std::move(connection.socket)),
      outgoing(connection.keys.value().outgoing, connection.keys->conceals),
      incoming(connection.keys->incoming, connection.keys->conceals) {}

TcpLink::TcpLink(int peer, int own, std::string peer_host, std::vector<Connection> streams, bool seals_payload)
    : ends_{peer, own, std::move(peer_host)}, seals_payload_(seals_payload) {
  for (Connection& connection : streams) {
    const int fd = streams_.emplace_back(std::move(connection)).fd();
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    const int on = 1;
    // Fails on sockets other than TCP, which do not delay.
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
}

void TcpLink::abandon() {
  for (Stream& stream : streams_) stream.socket.reset();
}

Ticket TcpLink::send(const Call& call, const void* data, size_t bytes) {
  const Ticket ticket = push(outgoing_, call, const_cast<void*>(data), bytes);
  Message& message = outgoing_[ticket];
  const std::span frame(message.sealed_frame.data(), sizeof(Frame));
  std::memcpy(frame.data(), &message.frame, sizeof(Frame));
  const Tag tag = streams_[0].outgoing.seal({ticket}, frame, 0, frame.data());
  std::memcpy(frame.data() + frame.size(), tag.data(), tag.size());
  return ticket;
}

Ticket TcpLink::recv(const Call& call, void* data, size_t bytes) { return push(incoming_, call, data, bytes); }

Ticket TcpLink::push(MessageQueue& queue, const Call& call, void* data, size_t bytes) const {
  const size_t stripes = (bytes + kStripeBytes - 1) / kStripeBytes;
  const bool is_sealed = seals_payload_ || call.is_sealed;
  return queue.push(call, static_cast<std::byte*>(data), bytes, kTagBytes * (1 + (is_sealed ? stripes : 0)));
}

bool TcpLink::progress() {
  struct PopFinished {  // also what has moved before the connection ended
    TcpLink& link;
    ~PopFinished() {
      link.outgoing_.pop_finished();
      link.incoming_.pop_finished();
    }
  };
  const PopFinished pop_finished{*this};
  bool moved = false;
  for (size_t stream = 0; stream < streams_.size(); ++stream) {
    moved |= send_some(stream);
    moved |= receive_some(stream);
  }
  return moved;
}

void TcpLink::add_poll(std::vector<pollfd>& fds) const {
  for (size_t stream = 0; stream < streams_.size(); ++stream) {
    const Stream& state = streams_[stream];
    Cursor out = state.out;
    skip_finished(outgoing_, stream, out);
    short events = 0;
    if (out.ticket <= outgoing_.last()) events |= POLLOUT;
    if (receive_wanted(stream)) events |= POLLIN;
    if (events != 0) fds.push_back({state.fd(), events, 0});
  }
}

size_t TcpLink::take_poll(std::span<const pollfd> fds) {
  size_t taken = 0;
  for (Stream& stream : streams_) {
    if (taken == fds.size() || fds[taken].fd != stream.fd()) continue;
    const short events = fds[taken++].revents;
    const bool is_over = (events & (POLLERR | POLLHUP | POLLNVAL)) != 0;  // the next call tells why
    stream.is_readable |= is_over || (events & POLLIN) != 0;
    stream.is_writable |= is_over || (events & POLLOUT) != 0;
  }
  return taken;
}

// The bytes of a message on this stream.
size_t TcpLink::bytes_on(const Message& message, size_t stream) const {
  const size_t round = kStripeBytes * streams_.size();
  const size_t rest = message.frame.bytes % round;
  const size_t begin = std::min(rest, stream * kStripeBytes);
  const size_t end = std::min(rest, (stream + 1) * kStripeBytes);
  const size_t rounds = message.frame.bytes / round;
  const size_t stripes = rounds + (begin < end ? 1 : 0);
  return frame_bytes_on(stream) + rounds * kStripeBytes + (end - begin) + stripes * tag_bytes(message);
}

// The stripe at byte `done` of this stream's share, after the frame.
TcpLink::Stripe TcpLink::stripe_at(const Message& message, size_t stream, size_t done) const {
  const size_t offset = done - frame_bytes_on(stream);
  const size_t stride = kStripeBytes + tag_bytes(message);
  const size_t number = offset / stride * streams_.size() + stream;
  const size_t begin = number * kStripeBytes;
  return {number, begin, std::min(kStripeBytes, message.frame.bytes - begin), offset % stride};
}

// Moves the cursor past the messages that this stream has finished or has no part of.
void TcpLink::skip_finished(const MessageQueue& queue, size_t stream, Cursor& cursor) const {
  if (cursor.ticket <= queue.finished()) cursor = {queue.finished() + 1, 0};
  while (cursor.ticket <= queue.last() && cursor.done == bytes_on(queue[cursor.ticket], stream)) {
    cursor = {cursor.ticket + 1, 0};
  }
}

// Moves the cursor by `bytes`, which this stream has sent or received.
void TcpLink::advance(MessageQueue& queue, size_t stream, Cursor& cursor, size_t bytes) const {
  while (bytes > 0) {
    skip_finished(queue, stream, cursor);
    Message& message = queue[cursor.ticket];
    const size_t part = std::min(bytes, bytes_on(message, stream) - cursor.done);
    cursor.done += part;
    message.left -= part;
    bytes -= part;
  }
  skip_finished(queue, stream, cursor);
}

// Lists the memory that this stream sends or receives next, up to the end of message `last` and the limits of one call.
// `find` returns the place of a sealed stripe. The list contains at most one, at its end, because the receiver must
// open it before it continues. Returns the number of pieces.
template <class Find>
size_t TcpLink::list_pieces(MessageQueue& queue, size_t stream, Cursor cursor, Ticket last, iovec* pieces,
                            Find&& find) const {
  size_t count = 0;
  size_t room = kCallBytes;
  const size_t frame_bytes = frame_bytes_on(stream);
  for (skip_finished(queue, stream, cursor); cursor.ticket <= last && count < kMaxPieces && room > 0;
       skip_finished(queue, stream, cursor)) {
    Message& message = queue[cursor.ticket];
    if (cursor.done < frame_bytes) {
      pieces[count++] = {message.sealed_frame.data() + cursor.done, frame_bytes - cursor.done};
      cursor.done = frame_bytes;
      continue;
    }
    const Stripe stripe = stripe_at(message, stream, cursor.done);
    if (is_sealed(message)) {
      if (room < kCallBytes) break;  // after payload of another message
      const Place place = find(message, cursor.ticket, stripe);
      if (stripe.done < stripe.bytes) pieces[count++] = {place.bytes + stripe.done, stripe.bytes - stripe.done};
      const size_t tag_done = std::max(stripe.done, stripe.bytes) - stripe.bytes;
      pieces[count++] = {place.tag + tag_done, kTagBytes - tag_done};
      break;
    }
    const size_t bytes = std::min(stripe.bytes - stripe.done, room);
    pieces[count++] = {message.data + stripe.begin + stripe.done, bytes};
    room -= bytes;
    cursor.done += bytes;
  }
  return count;
}

size_t TcpLink::list_outgoing(size_t stream, iovec* pieces) {
  Stream& state = streams_[stream];
  return list_pieces(outgoing_, stream, state.out, outgoing_.last(), pieces,
                     [&](const Message& message, Ticket ticket, const Stripe& stripe) {
                       return seal(state, message, ticket, stripe);
                     });
}

// Lists only messages whose frame has been checked.
size_t TcpLink::list_incoming(size_t stream, iovec* pieces) {
  Stream& state = streams_[stream];
  return list_pieces(incoming_, stream, state.in, checked_, pieces,
                     [&](const Message& message, Ticket, const Stripe& stripe) {
                       return Place{message.data + stripe.begin, state.arriving.data()};
                     });
}

// Seals a stripe exactly once, so that its tag and all its bytes belong together even if the memory changes meanwhile.
TcpLink::Place TcpLink::seal(Stream& stream, const Message& message, Ticket ticket, const Stripe& stripe) const {
  Sealed& sealed = stream.sealed;
  std::byte* const bytes = message.data + stripe.begin;
  if (sealed.ticket != ticket || sealed.number != stripe.number) {
    if (stream.outgoing.conceals()) sealed.text.resize(stripe.bytes);
    const Position position{ticket, static_cast<uint32_t>(stripe.number + 1)};
    sealed.tag = stream.outgoing.seal(position, {bytes, stripe.bytes}, 0, sealed.text.data());
    sealed.ticket = ticket;
    sealed.number = stripe.number;
  }
  return {stream.outgoing.conceals() ? sealed.text.data() : bytes, sealed.tag.data()};
}

bool TcpLink::send_some(size_t stream) {
  Stream& state = streams_[stream];
  if (!state.is_writable) return false;
  skip_finished(outgoing_, stream, state.out);
  if (state.out.ticket > outgoing_.last()) return false;
  iovec pieces[kMaxPieces + 1];
  msghdr header{};
  header.msg_iov = pieces;
  header.msg_iovlen = list_outgoing(stream, pieces);
  const ssize_t count = sendmsg(state.fd(), &header, MSG_NOSIGNAL);
  state.is_writable = count == static_cast<ssize_t>(bytes_of(header));
  if (count < 0) {
    if (errno == EAGAIN || errno == EINTR) return false;
    throw broken(errno);
  }
  advance(outgoing_, stream, state.out, static_cast<size_t>(count));
  return count > 0;
}

bool TcpLink::receive_wanted(size_t stream) const {
  Cursor in = streams_[stream].in;
  skip_finished(incoming_, stream, in);
  return in.ticket <= (stream == 0 ? incoming_.last() : std::min(checked_, incoming_.last()));
}

bool TcpLink::receive_some(size_t stream) {
  bool moved = stream == 0 && take_staged();
  Stream& state = streams_[stream];
  if (!state.is_readable || !receive_wanted(stream)) return moved;
  skip_finished(incoming_, stream, state.in);

  // Receives checked payload directly into its place and, on stream 0, the next frame into the staging buffer, which
  // take_staged() has emptied except for a part of a frame.
  iovec pieces[kMaxPieces + 2];
  msghdr header{};
  header.msg_iov = pieces;
  header.msg_iovlen = list_incoming(stream, pieces);
  const size_t payload = bytes_of(header);
  if (stream == 0) pieces[header.msg_iovlen++] = {staging_.data() + staged_end_, kStagingBytes - staged_end_};

  const ssize_t count = recvmsg(state.fd(), &header, 0);
  state.is_readable = count == static_cast<ssize_t>(bytes_of(header));
  if (count == 0) throw ends_.lost(" closed its connection");
  if (count < 0) {
    if (errno == EAGAIN || errno == EINTR) return moved;
    throw broken(errno);
  }
  const size_t direct = std::min(static_cast<size_t>(count), payload);
  accept_received(stream, direct);
  if (stream == 0) {
    staged_end_ += static_cast<size_t>(count) - direct;
    take_staged();
  }
  return true;
}

// Moves the receive cursor by bytes that list_incoming() has listed, and opens the stripe that they complete.
void TcpLink::accept_received(size_t stream, size_t bytes) {
  if (bytes == 0) return;
  Stream& state = streams_[stream];
  skip_finished(incoming_, stream, state.in);
  const Message& message = incoming_[state.in.ticket];
  if (is_sealed(message)) {
    const Stripe stripe = stripe_at(message, stream, state.in.done);
    const Position position{state.in.ticket, static_cast<uint32_t>(stripe.number + 1)};
    if (stripe.done + bytes == stripe.bytes + kTagBytes &&
        !state.incoming.open(position, {message.data + stripe.begin, stripe.bytes}, 0, state.arriving)) {
      throw ends_.lost(std::string(" was lost: ") + kAltered);
    }
  }
  advance(incoming_, stream, state.in, bytes);
}

// Opens and checks the frame of a message.
void TcpLink::take_frame(const std::byte* bytes, Ticket ticket) {
  Frame frame;
  Tag tag;
  std::memcpy(&frame, bytes, sizeof(frame));
  std::memcpy(tag.data(), bytes + sizeof(frame), tag.size());
  if (!streams_[0].incoming.open({ticket}, std::as_writable_bytes(std::span(&frame, 1)), 0, tag)) {
    throw ends_.lost(std::string(" was lost: ") + kAltered);
  }
  ends_.check(frame, incoming_[ticket].frame);
  checked_ = ticket;
}

// Consumes the staging buffer as far as receives are queued: checks frames, copies payload behind them.
bool TcpLink::take_staged() {
  Cursor& in = streams_[0].in;
  bool moved = false;
  for (skip_finished(incoming_, 0, in); in.ticket <= incoming_.last(); skip_finished(incoming_, 0, in)) {
    const size_t staged = staged_end_ - staged_begin_;
    const std::byte* next = staging_.data() + staged_begin_;
    size_t taken;
    if (in.done < kFrameBytes) {
      if (staged < kFrameBytes) break;
      take_frame(next, in.ticket);
      taken = kFrameBytes;
      advance(incoming_, 0, in, taken);
    } else {
      if (staged == 0) break;
      iovec pieces[kMaxPieces + 1];
      list_incoming(0, pieces);
      taken = std::min(staged, pieces[0].iov_len);
      std::memcpy(pieces[0].iov_base, next, taken);
      accept_received(0, taken);
    }
    staged_begin_ += taken;
    moved = true;
  }
  // Make room for the rest of a frame. The remaining bytes are a part of a frame, or belong to no queued receive.
  if (staged_begin_ > 0) {
    std::memmove(staging_.data(), staging_.data() + staged_begin_, staged_end_ - staged_begin_);
    staged_end_ -= staged_begin_;
    staged_begin_ = 0;
  }
  return moved;
}

Failure TcpLink::broken(int error) const {
  return Failure(FailureKind::kPeerLost, ends_.peer,
                 "lost the connection to " + ends_.peer_name() + ": " + std::generic_category().message(error));
}

}  // namespace ronde
