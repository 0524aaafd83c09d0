// The unfinished messages of one direction of a link, oldest first.
#pragma once

#include <cstddef>
#include <deque>

#include "links/frame.h"
#include "links/link.h"

namespace ronde {

struct Message {
  Frame frame;                    // the frame to send, or to which the peer's frame must be equal
  std::byte* data;                // not written while sending
  size_t left;                    // bytes of frame, payload and their tags not yet moved
  SealedFrame sealed_frame = {};  // the frame to send, if frames carry tags
};

class MessageQueue {
 public:
  // `tag_bytes`: the size of all tags that the message carries.
  Ticket push(const Call& call, std::byte* data, size_t bytes, size_t tag_bytes = 0) {
    messages_.push_back({Frame{.call = call, .bytes = bytes}, data, sizeof(Frame) + bytes + tag_bytes});
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
