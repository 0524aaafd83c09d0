#include "tcp_link.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

namespace ronde {
namespace {

// Small enough to spread a segment of an algorithm over several streams, large enough to cost no throughput.
constexpr size_t kStripeBytes = 128 << 10;
// What one system call is offered: far more than a socket buffer holds, far less than the kernel's limit of 2^31.
constexpr size_t kCallBytes = 16 << 20;
constexpr size_t kMaxPieces = 64;

}  // namespace

TcpLink::TcpLink(int peer, int own, std::string peer_host, std::vector<int> streams)
    : ends_{peer, own, std::move(peer_host)},
      // A lone stream has no reason to cut a payload into pieces.
      stripe_bytes_(streams.size() == 1 ? size_t{1} << 62 : kStripeBytes) {
  for (const int fd : streams) {
    streams_.push_back({fd, {}, {}});
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    const int on = 1;
    // Fails on other sockets than TCP, which have no such delay.
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
}

TcpLink::~TcpLink() {
  for (const Stream& stream : streams_) close(stream.fd);
}

void TcpLink::abandon() {
  for (Stream& stream : streams_) close(std::exchange(stream.fd, -1));
}

Ticket TcpLink::send(const Call& call, const void* data, size_t bytes) {
  return outgoing_.push(call, static_cast<std::byte*>(const_cast<void*>(data)), bytes);
}

Ticket TcpLink::recv(const Call& call, void* data, size_t bytes) {
  return incoming_.push(call, static_cast<std::byte*>(data), bytes);
}

bool TcpLink::progress() {
  bool moved = false;
  for (size_t stream = 0; stream < streams_.size(); ++stream) {
    moved |= send_some(stream);
    moved |= receive_some(stream);
  }
  outgoing_.pop_finished();
  incoming_.pop_finished();
  return moved;
}

void TcpLink::add_poll(std::vector<pollfd>& fds) const {
  for (size_t stream = 0; stream < streams_.size(); ++stream) {
    const Stream& state = streams_[stream];
    Cursor out = state.out;
    settle(outgoing_, stream, out);
    short events = 0;
    if (out.ticket <= outgoing_.last()) events |= POLLOUT;
    if (receive_wanted(stream)) events |= POLLIN;
    if (events != 0) fds.push_back({state.fd, events, 0});
  }
}

// How many bytes of the message go down this stream.
size_t TcpLink::share(const Message& message, size_t stream) const {
  const size_t round = stripe_bytes_ * streams_.size();
  const size_t rest = message.frame.bytes % round;
  const size_t begin = std::min(rest, stream * stripe_bytes_);
  const size_t end = std::min(rest, (stream + 1) * stripe_bytes_);
  return (stream == 0 ? sizeof(Frame) : 0) + message.frame.bytes / round * stripe_bytes_ + (end - begin);
}

// Where in the payload the byte number `share_offset` of this stream's share lies (the frame not counted).
size_t TcpLink::position(size_t stream, size_t share_offset) const {
  const size_t stripe = share_offset / stripe_bytes_ * streams_.size() + stream;
  return stripe * stripe_bytes_ + share_offset % stripe_bytes_;
}

// Moves the cursor past the messages of which this stream has nothing (more) to do.
void TcpLink::settle(const MessageQueue& queue, size_t stream, Cursor& cursor) const {
  if (cursor.ticket <= queue.finished()) cursor = {queue.finished() + 1, 0};
  while (cursor.ticket <= queue.last() && cursor.done == share(queue[cursor.ticket], stream)) {
    cursor = {cursor.ticket + 1, 0};
  }
}

// Accounts for `bytes` moved at the cursor.
void TcpLink::advance(MessageQueue& queue, size_t stream, Cursor& cursor, size_t bytes) const {
  while (bytes > 0) {
    settle(queue, stream, cursor);
    Message& message = queue[cursor.ticket];
    const size_t part = std::min(bytes, share(message, stream) - cursor.done);
    cursor.done += part;
    message.left -= part;
    bytes -= part;
  }
  settle(queue, stream, cursor);
}

// Lists the memory that comes next on this stream, up to the end of message `last` and the limits of one call.
// Returns the number of pieces.
size_t TcpLink::list_pieces(MessageQueue& queue, size_t stream, Cursor cursor, Ticket last, iovec* pieces,
                            size_t limit) const {
  size_t count = 0;
  size_t room = kCallBytes;
  const size_t frame_bytes = stream == 0 ? sizeof(Frame) : 0;
  for (settle(queue, stream, cursor); cursor.ticket <= last && count < limit && room > 0;
       settle(queue, stream, cursor)) {
    Message& message = queue[cursor.ticket];
    iovec& piece = pieces[count++];
    if (cursor.done < frame_bytes) {
      piece = {reinterpret_cast<std::byte*>(&message.frame) + cursor.done, frame_bytes - cursor.done};
    } else {
      const size_t offset = cursor.done - frame_bytes;
      const size_t begin = position(stream, offset);
      const size_t stripe_left = stripe_bytes_ - offset % stripe_bytes_;
      piece = {message.data + begin, std::min({stripe_left, message.frame.bytes - begin, room})};
      room -= piece.iov_len;
    }
    cursor.done += piece.iov_len;
  }
  return count;
}

bool TcpLink::send_some(size_t stream) {
  Stream& state = streams_[stream];
  settle(outgoing_, stream, state.out);
  if (state.out.ticket > outgoing_.last()) return false;
  iovec pieces[kMaxPieces];
  msghdr header{};
  header.msg_iov = pieces;
  header.msg_iovlen = list_pieces(outgoing_, stream, state.out, outgoing_.last(), pieces, kMaxPieces);
  const ssize_t count = sendmsg(state.fd, &header, MSG_NOSIGNAL);
  if (count < 0) {
    if (errno == EAGAIN || errno == EINTR) return false;
    throw broken(errno);
  }
  advance(outgoing_, stream, state.out, static_cast<size_t>(count));
  return count > 0;
}

bool TcpLink::receive_wanted(size_t stream) const {
  Cursor in = streams_[stream].in;
  settle(incoming_, stream, in);
  return in.ticket <= (stream == 0 ? incoming_.last() : std::min(checked_, incoming_.last()));
}

bool TcpLink::receive_some(size_t stream) {
  bool moved = stream == 0 && take_staged();
  if (!receive_wanted(stream)) return moved;
  Stream& state = streams_[stream];
  settle(incoming_, stream, state.in);

  // Checked payload straight to its place; behind it, on stream 0, the next frame into the staging buffer, which
  // take_staged() has emptied up to a part of a frame.
  iovec pieces[kMaxPieces + 1];
  msghdr header{};
  header.msg_iov = pieces;
  header.msg_iovlen = list_pieces(incoming_, stream, state.in, checked_, pieces, kMaxPieces);
  size_t payload = 0;
  for (size_t i = 0; i < header.msg_iovlen; ++i) payload += pieces[i].iov_len;
  if (stream == 0) pieces[header.msg_iovlen++] = {staging_.data() + staged_end_, kStagingBytes - staged_end_};

  const ssize_t count = recvmsg(state.fd, &header, 0);
  if (count == 0) throw ends_.lost(" closed its connection");
  if (count < 0) {
    if (errno == EAGAIN || errno == EINTR) return moved;
    throw broken(errno);
  }
  const size_t direct = std::min(static_cast<size_t>(count), payload);
  advance(incoming_, stream, state.in, direct);
  if (stream == 0) {
    staged_end_ += static_cast<size_t>(count) - direct;
    take_staged();
  }
  return true;
}

// Consumes the staging buffer as far as receives are queued: checks frames, copies payload behind them.
bool TcpLink::take_staged() {
  Cursor& in = streams_[0].in;
  bool moved = false;
  for (settle(incoming_, 0, in); in.ticket <= incoming_.last(); settle(incoming_, 0, in)) {
    const size_t staged = staged_end_ - staged_begin_;
    const std::byte* next = staging_.data() + staged_begin_;
    size_t taken;
    if (in.done < sizeof(Frame)) {
      if (staged < sizeof(Frame)) break;
      Frame frame;
      std::memcpy(&frame, next, sizeof(frame));
      ends_.check(frame, incoming_[in.ticket].frame);
      checked_ = in.ticket;
      taken = sizeof(frame);
    } else {
      if (staged == 0) break;
      iovec piece{};
      list_pieces(incoming_, 0, in, checked_, &piece, 1);
      taken = std::min(staged, piece.iov_len);
      std::memcpy(piece.iov_base, next, taken);
    }
    advance(incoming_, 0, in, taken);
    staged_begin_ += taken;
    moved = true;
  }
  // Make room for the rest of a frame; what is left is less than a frame, or nobody has asked for it yet.
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
