// Links between hosts that are parts of one process: a message is copied when both ends have asked for it, and counted.
#pragma once

#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "check.h"
#include "links/link.h"
#include "traffic/cores.h"
#include "waiting/bell.h"

namespace ronde::testing {

// A rank, as its links see it.
struct Endpoint {
  HostMemory* host;
  int core;  // of the host
  BellHandle bell;
  std::atomic<uint64_t> sent_bytes{0}, received_bytes{0}, messages{0};  // to, from, and both, of other hosts
};

// One direction of a link.
class Channel {
 public:
  Channel(Endpoint& sender, Endpoint& receiver) : sender_(sender), receiver_(receiver) {}

  // Each of these returns its message's number, from 1.
  Ticket send(const Call& call, const void* data, size_t bytes) {
    const std::lock_guard lock(mutex_);
    sends_.push_back({call, const_cast<void*>(data), bytes});
    if (match()) receiver_.bell.ring();
    return sends_.size();
  }
  Ticket receive(const Call& call, void* data, size_t bytes) {
    const std::lock_guard lock(mutex_);
    receives_.push_back({call, data, bytes});
    if (match()) sender_.bell.ring();
    return receives_.size();
  }
  Ticket done() const { return done_.load(std::memory_order_acquire); }

 private:
  struct Message {
    Call call;
    void* data;
    size_t bytes;
  };

  bool match() {
    const size_t next = done_.load(std::memory_order_relaxed);
    if (next == sends_.size() || next == receives_.size()) return false;
    const Message &from = sends_[next], &to = receives_[next];
    CHECK(from.call == to.call && from.bytes == to.bytes);
    if (to.bytes > 0) std::memcpy(to.data, from.data, to.bytes);
    // The sender's system call reads the message. The receiver's reads it where the network card has put it, and
    // writes.
    count_of(*sender_.host, sender_.core, from.data, from.bytes, false);
    count_of(*receiver_.host, receiver_.core, to.data, to.bytes, true);
    receiver_.host->data_lines += (to.bytes + kLineBytes - 1) / kLineBytes;
    sender_.sent_bytes += from.bytes;
    receiver_.received_bytes += from.bytes;
    ++sender_.messages;
    ++receiver_.messages;
    done_.store(next + 1, std::memory_order_release);
    return true;
  }

  Endpoint& sender_;
  Endpoint& receiver_;
  std::mutex mutex_;
  std::vector<Message> sends_, receives_;
  std::atomic<uint64_t> done_{0};
};

class CountedLink final : public Link {
 public:
  CountedLink(Channel& out, Channel& in) : out_(out), in_(in) {}
  Ticket send(const Call& call, const void* data, size_t bytes) override {
    return last_sent_ = out_.send(call, data, bytes);
  }
  Ticket recv(const Call& call, void* data, size_t bytes) override {
    return last_received_ = in_.receive(call, data, bytes);
  }
  Ticket sent() const override { return out_.done(); }
  Ticket received() const override { return in_.done(); }
  bool progress() override { return false; }
  bool pending() const override { return sent() < last_sent_ || received() < last_received_; }
  bool has_end_of_file() const override { return false; }

 private:
  Channel& out_;
  Channel& in_;
  Ticket last_sent_ = 0, last_received_ = 0;
};

}  // namespace ronde::testing
