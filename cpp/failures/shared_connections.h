// The resources that all communicators of a process share: a control connection to every other process of the world,
// the one thread that reads them, and the bells that wake a process which waits for sockets.
//
// The rules:
//   1. A process's number is its rank in the world. Every message carries the number of its communicator, which the
//      ranks derive from the communicator's name. A message for a communicator that this process has left is dropped.
//      None comes too early: all ranks join a communicator before any of them sends (comm/bootstrap.py synchronizes
//      them in between).
//   2. The end of a connection concerns every communicator of which the process at its other end is a rank. So does a
//      malformed message, or one whose tag does not match (sealer.h): nothing from its sender can be trusted.
//   3. The thread starts with the first communicator that has a connection, and ends with the last communicator; then
//      the connections are closed.
//   4. Within a host a message may carry a file descriptor.
//   5. A receiver acknowledges the messages that it has read, and a sender has at most kMostUnread unread messages per
//      receiver in flight; the others wait here. So the receive buffer of a stopped process never fills.
//
// The reason for rule 5: a process that is merely stopped keeps its connections, and the other ranks wait for it. But
// TCP_USER_TIMEOUT, which detects an unreachable host, takes a receive window that stays closed for one, so no data may
// stay unsent in the kernel.
#pragma once

#include <poll.h>

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "failures/watch_message.h"
#include "links/connection.h"
#include "system/descriptor.h"

namespace ronde {

// The error about the sender of a malformed message; follows its name.
inline std::string distrust_of(const ProtocolError& error) {
  return std::string(" sent ") + error.what() + ": do all ranks run the same version of Ronde?";
}

class SharedConnections {
 public:
  // `controls`: the connections to other processes of the world, by process.
  explicit SharedConnections(std::map<int, Connection> controls);
  ~SharedConnections() { stop(); }
  SharedConnections(const SharedConnections&) = delete;
  SharedConnections& operator=(const SharedConnections&) = delete;

  // The end of a connection and its reason.
  struct End {
    std::string what;           // for errors, follows the process's name
    bool is_violation = false;  // concerns communicators that the process has left, too
  };

  // One communicator of this process. The thread calls it, and join() does for earlier ends. Must not block.
  class Member {
   public:
    virtual ~Member() = default;
    // Throws ProtocolError if the message is malformed.
    virtual void on_message(int process, std::span<const std::byte> message, Descriptor attached) = 0;
    virtual void on_end(int process, const End& end) = 0;
    virtual void on_alarm() = 0;
    // The thread ends because of an error of poll(2).
    virtual void on_poll_error(int error) = 0;
  };
  // Throws UsageError if this process has left the world, or has a communicator of this number.
  void join(uint64_t communicator, Member& member);
  // After its return the thread does not call the member.
  void leave(uint64_t communicator);
  // Adds connections to further processes of a world that is being made. Nothing is sent to a process before that.
  // Throws UsageError as join(), or if a process has a connection.
  void add(std::map<int, Connection> controls);

  // Sends in order, each message once its receiver has room (rule 5). Any thread; never blocks. `attached`: within a
  // host only.
  void send(int process, const WatchMessage& message, Descriptor attached = {});
  // Makes the thread call all members' alarm at this time (steady clock). Only the thread may call it.
  void set_alarm(int64_t at_ns);
  // The process id of a process of this host in this process's PID namespace, or 0.
  int pid_of(int process);

  // Whether a process, other than this one, has closed its connection: on this host it has ended.
  bool has_ended(int process);

  // The eventfd of a process of this host, or of this one; null: none. Set it before any communicator uses it.
  void set_bell(int process, Descriptor bell) { bells_[process] = std::move(bell); }
  const Descriptor* bell(int process) const;

  // For a forked child, where the thread does not exist: closes everything without a message. Takes no lock. The object
  // must not be destroyed afterwards. May be called again.
  void abandon();

 private:
  struct Outgoing {
    WatchMessage message;
    Descriptor attached{};
  };
  // A message in the form in which it is sent.
  struct Packet {
    std::array<std::byte, sizeof(WatchMessage) + kTagBytes> bytes;
    size_t sent = 0;
    Descriptor attached{};
  };
  // The messages to one process. `sent` and `read` do not count those of kRead.
  struct Flow {
    uint64_t sent = 0, read = 0;
    std::deque<Outgoing> held;     // wait until the process has read more
    std::deque<Packet> backlog{};  // wait until the socket takes them
    bool is_over = false;          // the process has closed the connection and reads nothing more
  };
  // What the thread knows about a process, and the received part of its next message.
  struct Inbox {
    int process;
    const Descriptor& socket;
    SealedConnection* seals;  // null: its messages carry no tags
    std::array<std::byte, sizeof(WatchMessage) + kTagBytes> bytes{};
    size_t filled = 0;
    Descriptor attached{};
    uint64_t read = 0;  // messages read, without those of kRead
  };

  // What the thread shares with end_thread(). It outlives this object if end_thread() cannot wake the thread.
  struct Ending {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_wanted = false, is_polling = false, has_ended = false;

    // The thread calls them around poll(2). It ends if one returns false, and accesses nothing else from then on.
    bool begin_poll();
    bool end_poll();
    void end();
  };

  void insert(std::map<int, Connection> controls);
  void start_thread();
  void stop();
  void end_thread();
  void run(Ending& ending);
  void take_added(std::vector<Inbox>& inboxes, std::vector<pollfd>& fds);
  bool receive_from(int fd, Inbox& inbox);
  void handle_message(std::span<const std::byte> bytes, Inbox& inbox);
  void report_end(int process, const End& end);
  void report_poll_error(int error);
  int poll_limit_ms() const;
  void ring_alarm();
  void wake_thread() const;
  size_t wire_bytes(int process) const { return sizeof(WatchMessage) + (seals_.contains(process) ? kTagBytes : 0); }
  void send_what_fits(int process);
  void transmit(int process, Outgoing outgoing);
  void flush(int process);
  void handle_read_count(int process, uint64_t count);
  void report_read(Inbox& inbox);

  std::map<int, Connection> controls_;  // guarded by sending_; while the thread runs, none is removed
  std::vector<int> added_;              // processes that the thread does not read yet; guarded by sending_
  std::map<int, Descriptor> bells_;
  Descriptor wake_;  // makes the thread check the backlogs and ending_
  // By process on another host; guarded by sending_. Only the thread opens.
  std::map<int, SealedConnection> seals_;

  std::mutex sending_;         // held for whole messages; none is sent after stop()
  std::map<int, Flow> flows_;  // by process; guarded by sending_

  std::mutex joining_;  // held while the thread calls members; guards the three below
  std::map<uint64_t, Member*> members_;
  std::map<int, End> ends_;
  bool is_over_ = false;

  int64_t alarm_ns_ = 0;  // used by the thread only; 0: none
  std::shared_ptr<Ending> ending_ = std::make_shared<Ending>();
  std::unique_ptr<std::thread> thread_;  // guarded by joining_ until is_over_
};

}  // namespace ronde
