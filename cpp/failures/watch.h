// The failure detector of one communicator, and its control messages, over the control connections that all
// communicators of the process share (shared_connections.h). The thread of these connections calls it.
//
// The rules:
//   1. The end of a connection, or an error, without a goodbye means that the rank is lost. The kernel closes a dead
//      process's sockets, so every rank notices a death on any host at once; keepalive detects an unreachable host.
//   2. A goodbye carries the number of collective calls that its rank has made. It is a failure only for a rank that
//      makes a later call.
//   3. The rank that detects a failure announces it to all others. On each rank the first failure wins (FailureState).
//   4. A rank whose call takes long announces the call to all others. So ranks that wait for each other in different
//      calls find the mismatch.
//   5. It also carries notes from rank to rank: a few words, reliably and in order, to the listener of a channel. The
//      engine has one channel, the stall inspection another. Between ranks of one host it carries descriptors of
//      memory.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "communicator/call.h"
#include "failures/failure_state.h"
#include "failures/shared_connections.h"
#include "failures/watch_message.h"
#include "waiting/bell.h"

namespace ronde {

class Watch : private SharedConnections::Member {
 public:
  // `names[rank]`: the rank's name in errors. `communicator`: its number, equal on all its ranks and unique. From here
  // on messages of the other ranks arrive. `processes`: the processes of its ranks.
  Watch(int rank, std::vector<std::string> names, std::shared_ptr<SharedConnections> connections, uint64_t communicator,
        std::vector<int> processes);
  ~Watch() override { stop(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  FailureState& failure() { return failure_; }
  // The watch rings this bell when the communicator fails or a rank leaves.
  void set_bell(BellHandle own);
  // The eventfd that wakes a rank of this host; null: none.
  const Descriptor* eventfd_of(int rank) const { return connections_->bell(processes_[rank]); }

  // Sends a rank of this host a duplicate of a descriptor; -1 tells it that there is none. Never blocks.
  void send_descriptor(int rank, int fd);
  // The next descriptor from that rank; -1 if it has none, kNoRoom if this process has too many open descriptors;
  // nothing if none comes in time. Throws Failure.
  static constexpr int kNoRoom = -2;
  std::optional<int> receive_descriptor(int rank, int64_t timeout_ns);

  // This rank begins call number `number` (from 0). Throws Failure if a rank has left before that call.
  void begin_call(uint64_t number);
  // Announces that the current call takes long (rule 4). `direction`: if it is a send or receive. `posted_at`: see
  // CallTerms.
  struct Direction {
    int peer = -1;
    bool sends = false;
  };
  void announce_long_call(const Call& call, Direction direction, int64_t since_ns, std::string posted_at = {});
  // The announced call has ended.
  void end_long_call();
  struct LongCall {
    Call call;
    Direction direction;
    uint64_t number;          // of a send or receive: the number of earlier messages in that direction
    int64_t since_ns = 0;     // of this rank's call: when the wait began
    std::string posted_at{};  // of this rank's call: see CallTerms
  };
  // This rank's current call, if it takes long.
  std::optional<LongCall> long_call();
  // The number of messages sent or received in that direction.
  uint64_t messages(Direction direction) const {
    return direction.peer < 0 ? 0 : (direction.sends ? sent_to_ : received_from_)[direction.peer].load();
  }
  // Counts a message that has been sent or received.
  void count_message(Direction direction) {
    (direction.sends ? sent_to_ : received_from_)[direction.peer].fetch_add(1);
  }
  // True if `rank` has sent its goodbye, after which it neither sends nor receives.
  bool has_left(int rank) const { return departures_[rank].load(std::memory_order_acquire) != kPresent; }
  // True if `rank` has sent its goodbye or its process has ended.
  bool has_gone(int rank) const { return has_left(rank) || connections_->has_ended(processes_[rank]); }
  const std::string& name(int rank) const { return names_[rank]; }

  // Receives the watch's events. The watch's thread calls it (on_change also other threads). Must not block.
  class Listener {
   public:
    virtual ~Listener() = default;
    // Throws ProtocolError if the note is malformed: then its sender counts as lost.
    virtual void on_note(int peer, std::span<const uint32_t> words) = 0;
    // The communicator has failed, or a rank has left.
    virtual void on_change() = 0;
    // The time passed to set_alarm() has come.
    virtual void on_alarm() {}
    // This rank's call takes long. For the channel kStalls only; the waiting thread calls it.
    virtual void on_long_call() {}
  };
  enum class Channel { kEngine, kStalls };
  void set_listener(Listener* listener, Channel channel = Channel::kEngine);
  // Calls on_alarm() of the channel kStalls at this time (steady clock). Use it only within on_note() and on_alarm().
  void set_alarm(int64_t at_ns) { connections_->set_alarm(at_ns); }
  static constexpr size_t kNoteWords = WatchMessage::kNoteWords;
  // Sends at most kNoteWords words to `rank`'s listener. Any thread; never blocks.
  void send_note(int rank, std::span<const uint32_t> words, Channel channel = Channel::kEngine);
  // The number of calls that this rank has begun.
  uint64_t calls_begun() const { return calls_begun_.load(std::memory_order_seq_cst); }
  // The process id of a rank of this host in this process's PID namespace, or 0.
  int process_of(int rank) { return connections_->pid_of(processes_[rank]); }
  // The failure of call number `number` if a rank has left before that call.
  std::optional<Failure> departed(uint64_t number) const;

  // A peer has sent a malformed message: it counts as lost, and all ranks learn the reason. Within on_note() throw
  // ProtocolError instead.
  void distrust(const ProtocolError& error);

  // Announces a failure to every rank, and wakes a waiting call of this rank.
  void announce_failure(const Failure& failure);
  void send_goodbye(uint64_t calls_made);
  // Leaves the communicator. For the others this is a failure unless send_goodbye() came first.
  void stop();
  // For a forked child: closes the connections without a message. Takes no lock. The object must not be destroyed
  // afterwards.
  void abandon();

 private:
  static constexpr uint64_t kPresent = WatchMessage::kNoCalls;
  using Message = WatchMessage;

  void on_message(int process, std::span<const std::byte> bytes, Descriptor attached) override;
  void on_end(int process, const SharedConnections::End& end) override;
  void on_alarm() override;
  void on_poll_error(int error) override;
  void handle_message(int peer, const Message& message);
  void handle_long_call(int peer, const Message& message);
  void handle_note(int peer, const Message& message);
  void handle_descriptor(int peer, const Message& message, Descriptor attached);
  void report(FailureKind kind, int rank, const std::string& reason);
  void send_to_all(const Message& message);
  void send_to(int peer, Message message, Descriptor attached = {});
  void notify();
  void note_departure(int peer, uint64_t calls_made);
  void compare(int peer, const LongCall& theirs, const LongCall& ours);
  std::string departure_reason(int peer) const;

  int rank_;
  std::vector<std::string> names_;
  std::shared_ptr<SharedConnections> connections_;
  uint64_t communicator_;
  std::vector<int> processes_;  // by rank
  std::map<int, int> ranks_;    // the other ranks, by process
  FailureState failure_;

  std::mutex sending_;
  bool has_left_ = false;  // guarded by sending_; if true, nothing is sent
  bool has_sent_goodbye_ = false;
  std::mutex receiving_;
  std::condition_variable received_;
  std::map<int, std::deque<int>> descriptors_;  // by rank, as receive_descriptor() returns them; guarded by receiving_

  std::mutex listening_;
  std::optional<BellHandle> own_;                      // guarded by listening_, as are the listeners
  Listener* listeners_[WatchMessage::kChannels] = {};  // by channel
  std::vector<std::atomic<uint64_t>> departures_;      // by rank: the calls it made before it left, or kPresent
  std::atomic<int> left_count_{0};
  std::vector<std::atomic<uint64_t>> sent_to_, received_from_;  // by rank: messages of send and receive
  std::atomic<uint64_t> calls_begun_{0};
  std::mutex calls_;                    // guards the three below
  std::map<int, LongCall> long_calls_;  // by rank: the last one that it announced
  std::optional<LongCall> long_call_;   // this rank's last one
  bool is_in_long_call_ = false;
  bool is_abandoned_ = false;
};

}  // namespace ronde
