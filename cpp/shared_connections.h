// What all communicators of a process share: a control connection to every other process of the world, the one thread
// that listens on them, and the bells that wake a process which waits for sockets.
//
// The rules:
//   1. Processes are named by their rank in the world. Every message names the communicator that it is for, by a number
//      that its ranks derive from its name. A message for one that this process has left is dropped. None comes too
//      early: all ranks join a communicator before any of them sends (comm/bootstrap.py makes them meet in between).
//   2. The end of a connection concerns every communicator of which the process at its other end is a rank. So does a
//      message that makes no sense, or whose tag does not fit (sealer.h): nothing that its sender says can be believed.
//   3. The thread begins with the first communicator and ends with the last; then the connections are closed.
//   4. Within a host a message may bring a file descriptor.
// A process that is merely stopped keeps its connections, so it is waited for. For that nothing may stay unsent in the
// kernel because its receive buffer is full: TCP_USER_TIMEOUT, by which an unreachable host is noticed, takes a window
// that stays closed for the same. So a process says what it has read, and nobody has more than some messages unread
// there; the others wait here.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>

#include "connection.h"
#include "descriptor.h"
#include "error.h"
#include "watch_message.h"

namespace ronde {

// What is said of a sender that makes no sense, after its name.
inline std::string distrust_of(const ProtocolError& error) {
  return std::string(" sent ") + error.what() + ": do all ranks run the same version of Ronde?";
}

class SharedConnections {
 public:
  // `controls`: by process, all others of the world.
  explicit SharedConnections(std::map<int, Connection> controls);
  ~SharedConnections() { stop(); }
  SharedConnections(const SharedConnections&) = delete;
  SharedConnections& operator=(const SharedConnections&) = delete;

  // Why nothing comes from a process any more.
  struct End {
    std::string what;           // for people, after the process's name
    bool is_violation = false;  // concerns communicators that the process has left, too
  };

  // One communicator of this process. Called by the thread, and by join() for what was before: must not block.
  class Member {
   public:
    virtual ~Member() = default;
    // Throws ProtocolError if the message makes no sense.
    virtual void hear(int process, std::span<const std::byte> message, Descriptor attached) = 0;
    virtual void hear_end(int process, const End& end) = 0;
    virtual void hear_alarm() = 0;
    // The thread ends, with an error of poll(2).
    virtual void give_up(int error) = 0;
  };
  // Throws UsageError if this process has left the world, or has such a communicator.
  void join(uint64_t communicator, Member& member);
  // Returns when the thread calls the member no more.
  void leave(uint64_t communicator);

  // In order, and as soon as the process has room for it. Any thread; never blocks. `attached`: within a host.
  void send(int process, const WatchMessage& message, Descriptor attached = {});
  // Has all members hear an alarm at this time (steady clock). Only by the thread.
  void set_alarm(int64_t at_ns);
  // The id of a process of this host as this process sees it, or 0.
  int pid_of(int process);

  // The eventfd of a process of this host, also of this one; -1: there is none. Set before any communicator uses it.
  void set_bell(int process, Descriptor bell) { bells_[process] = std::move(bell); }
  int bell(int process) const;

  // In a forked child, where the thread does not exist: closes everything and says nothing. Takes no lock; not to be
  // destroyed afterwards. May be called again.
  void abandon();

 private:
  struct Outgoing {
    WatchMessage message;
    Descriptor attached{};
  };
  // A message on its way to the kernel.
  struct Packet {
    std::array<std::byte, sizeof(WatchMessage) + kTagBytes> bytes;
    size_t sent = 0;
    Descriptor attached{};
  };
  // Towards one process: whole messages, without those of kRead.
  struct Flow {
    uint64_t sent = 0, read = 0;
    std::deque<Outgoing> held;     // until the process has read more
    std::deque<Packet> backlog{};  // what its socket has not taken yet
    bool is_over = false;          // the process has closed the connection: it reads nothing any more
  };
  // What has come of a process's next message.
  struct Inbox {
    std::array<std::byte, sizeof(WatchMessage) + kTagBytes> bytes;
    size_t filled = 0;
    Descriptor attached{};
    uint64_t read = 0;  // messages, without those of kRead
  };

  void stop();
  void run();
  bool hear(int process, int fd, Inbox& inbox);
  void hear_message(int process, std::span<const std::byte> bytes, Inbox& inbox);
  void tell_end(int process, const End& end);
  void give_up(int error);
  int poll_limit_ms() const;
  void ring_alarm();
  void wake_thread() const;
  size_t wire_bytes(int process) const { return sizeof(WatchMessage) + (seals_.contains(process) ? kTagBytes : 0); }
  void send_what_fits(int process);
  void transmit(int process, Outgoing outgoing);
  void flush(int process);
  void hear_read(int process, uint64_t count);
  void tell_read(int process, Inbox& inbox);

  std::map<int, Connection> controls_;  // unchanged while the thread runs
  std::map<int, Descriptor> bells_;
  Descriptor wake_;  // makes the thread look at the backlogs, and whether it shall stop
  // By process on another host. Sealing is guarded by sending_, opening is the thread's.
  std::map<int, SealedConnection> seals_;

  std::mutex sending_;         // whole messages only, and none after stop()
  std::map<int, Flow> flows_;  // by process; guarded by sending_

  std::mutex joining_;  // held while the thread calls members; guards the three below
  std::map<uint64_t, Member*> members_;
  std::map<int, End> ends_;
  bool is_over_ = false;

  int64_t alarm_ns_ = 0;  // of the thread; 0: none
  std::atomic<bool> stopping_{false};
  std::unique_ptr<std::thread> thread_;  // guarded by joining_ until is_over_
};

}  // namespace ronde
