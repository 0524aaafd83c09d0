// A link between two ranks of one host: two pipes in shared memory, one per direction.
//
// A pipe is a ring with one writer and one reader. Both counters only grow; byte number k lies at ring[k % capacity].
// Writer and reader copy at the same time: each publishes its progress every few KiB, and rings the other's bell
// when it begins and when it ends.
//
// Each side keeps its own counter in private memory, only publishes it, and checks the other's counter before use. So
// whatever the other process writes into the pipe, this one never accesses memory outside the ring.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "links/frame.h"
#include "links/link.h"
#include "links/message_queue.h"
#include "waiting/bell.h"

namespace ronde {

// Lies in shared memory, aligned to a cache line. Zeroed memory is an empty pipe.
struct ShmPipe {
  static constexpr size_t kCapacity = 256 << 10;

  alignas(64) std::atomic<uint64_t> written;  // bytes that the writer has published
  alignas(64) std::atomic<uint64_t> taken;    // bytes whose room the reader has released
  alignas(64) std::byte ring[kCapacity];

  static constexpr size_t bytes() { return sizeof(ShmPipe); }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

class ShmLink final : public Link {
 public:
  // Owns neither the pipes nor the bell; they must outlive the link. It rings `peer_bell` when the peer can continue.
  ShmLink(int peer, int own, std::string peer_host, ShmPipe* outgoing, ShmPipe* incoming, BellHandle peer_bell);

  Ticket send(const Call& call, const void* data, size_t bytes) override;
  Ticket recv(const Call& call, void* data, size_t bytes) override;
  Ticket sent() const override { return outgoing_.finished(); }
  Ticket received() const override { return incoming_.finished(); }
  bool progress() override;
  bool pending() const override { return !outgoing_.empty() || !incoming_.empty(); }
  bool has_end_of_file() const override { return false; }

 private:
  bool write_some();
  bool read_some();

  Ends ends_;
  BellHandle peer_bell_;
  ShmPipe* out_pipe_;
  ShmPipe* in_pipe_;
  uint64_t written_ = 0;  // into out_pipe_, published or not
  uint64_t taken_ = 0;    // from in_pipe_, published or not
  MessageQueue outgoing_;
  MessageQueue incoming_;
  Frame arriving_;  // the received part of the oldest incoming message's frame
};

}  // namespace ronde
