#include "links/shm_link.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "system/take_over.h"

namespace ronde {
namespace {

// The interval at which a copy in progress is published: often enough to keep the other side busy, seldom enough to
// cause little traffic on the counter's cache line.
constexpr size_t kPublishBytes = 32 << 10;

// Says what a copy in progress has done. A peer that sleeps is woken at the beginning and at the end of the copy only:
// if both ranks have to share a core, it would otherwise take the core from this one at every publication.
class Publisher {
 public:
  Publisher(std::atomic<uint64_t>& counter, const BellHandle& peer_bell) : counter_(counter), peer_bell_(peer_bell) {}

  void add(uint64_t total, size_t bytes) {
    unpublished_ += bytes;
    if (unpublished_ < kPublishBytes) return;
    counter_.store(total, std::memory_order_release);
    unpublished_ = 0;
    if (!std::exchange(has_rung_, true)) peer_bell_.ring();
  }
  void finish(uint64_t total) {
    if (unpublished_ > 0) counter_.store(total, std::memory_order_release);
    peer_bell_.ring();
  }

 private:
  std::atomic<uint64_t>& counter_;
  const BellHandle& peer_bell_;
  size_t unpublished_ = 0;
  bool has_rung_ = false;
};

// The next contiguous piece of a message: first its frame, then its payload.
struct Piece {
  std::byte* data;
  size_t bytes;
};

Piece next_piece(const Message& message, Frame& frame) {
  const size_t done = sizeof(Frame) + message.frame.bytes - message.left;
  if (done < sizeof(Frame)) return {reinterpret_cast<std::byte*>(&frame) + done, sizeof(Frame) - done};
  return {message.data + (done - sizeof(Frame)), message.left};
}

// The number of contiguous bytes in the ring from `counter` on.
size_t until_wrap(uint64_t counter) { return ShmPipe::kCapacity - counter % ShmPipe::kCapacity; }

}  // namespace

ShmLink::ShmLink(int peer, int own, std::string peer_host, ShmPipe* outgoing, ShmPipe* incoming, BellHandle peer_bell)
    : ends_{peer, own, std::move(peer_host)}, peer_bell_(peer_bell), out_pipe_(outgoing), in_pipe_(incoming) {}

Ticket ShmLink::send(const Call& call, const void* data, size_t bytes) {
  return outgoing_.push(call, static_cast<std::byte*>(const_cast<void*>(data)), bytes);
}

Ticket ShmLink::recv(const Call& call, void* data, size_t bytes) {
  return incoming_.push(call, static_cast<std::byte*>(data), bytes);
}

bool ShmLink::progress() {
  const bool wrote = write_some();
  const bool read = read_some();
  return wrote || read;
}

bool ShmLink::write_some() {
  if (outgoing_.empty()) return false;
  const uint64_t used = written_ - out_pipe_->taken.load(std::memory_order_acquire);
  if (used > ShmPipe::kCapacity) throw ends_.lost(" has corrupted the shared memory");
  size_t room = ShmPipe::kCapacity - used;
  if (room == 0) return false;

  Publisher publisher(out_pipe_->written, peer_bell_);
  while (room > 0 && !outgoing_.empty()) {
    Message& message = outgoing_.front();
    const Piece piece = next_piece(message, message.frame);
    const size_t bytes = std::min({piece.bytes, room, until_wrap(written_), kPublishBytes});
    std::memcpy(out_pipe_->ring + written_ % ShmPipe::kCapacity, piece.data, bytes);
    written_ += bytes;
    room -= bytes;
    message.left -= bytes;
    outgoing_.pop_finished();
    publisher.add(written_, bytes);
  }
  publisher.finish(written_);
  return true;
}

bool ShmLink::read_some() {
  if (incoming_.empty()) return false;
  size_t available = in_pipe_->written.load(std::memory_order_acquire) - taken_;
  if (available > ShmPipe::kCapacity) throw ends_.lost(" has corrupted the shared memory");
  if (available == 0) return false;

  Publisher publisher(in_pipe_->taken, peer_bell_);
  while (available > 0 && !incoming_.empty()) {
    Message& message = incoming_.front();
    const Piece piece = next_piece(message, arriving_);
    const size_t bytes = std::min({piece.bytes, available, until_wrap(taken_), kPublishBytes});
    copy_and_take_over(piece.data, in_pipe_->ring + taken_ % ShmPipe::kCapacity, bytes);
    taken_ += bytes;
    available -= bytes;
    message.left -= bytes;
    // The frame is now complete in private memory, where the peer cannot change it.
    if (message.left == message.frame.bytes) ends_.check(arriving_, message.frame);
    incoming_.pop_finished();
    publisher.add(taken_, bytes);
  }
  publisher.finish(taken_);
  return true;
}

}  // namespace ronde
