// The unfinished messages of one direction of a link, oldest first.
#pragma once

#include <cstddef>
#include <deque>

#include "frame.h"
#include "link.h"

namespace ronde {

struct Message {
  Frame frame;      // sent as it is, or what the peer's frame must be equal to
  std::byte* data;  // const while sending
  size_t left;      // bytes of frame and payload not yet moved
};

class MessageQueue {
 public:
  Ticket push(const Call& call, std::byte* data, size_t bytes) {
    messages_.push_back({Frame{.call = call, .bytes = bytes}, data, sizeof(Frame) + bytes});
    return last();
  }

  bool empty() const { return messages_.empty(); }
  Ticket finished() const { return finished_; }
  Ticket last() const { return finished_ + messages_.size(); }

  // The message of an unfinished ticket: finished() < ticket <= last().
  Message& operator[](Ticket ticket) { return messages_[ticket - finished_ - 1]; }
  const Message& operator[](Ticket ticket) const { return messages_[ticket - finished_ - 1]; }
  Message& front() { return messages_.front(); }

  void pop_finished() {
    while (!messages_.empty() && messages_.front().left == 0) {
      messages_.pop_front();
      ++finished_;
    }
  }

 private:
  std::deque<Message> messages_;
  Ticket finished_ = 0;
};

}  // namespace ronde
