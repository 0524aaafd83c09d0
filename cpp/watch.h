// The failure detector of one communicator: what its ranks tell each other beside tensors, over the control connections
// that all communicators of the process share (shared_connections.h), whose thread calls it.
//
// The rules:
//   1. The end of a connection, or an error, without a goodbye means that the rank is lost. The kernel closes a dead
//      process's sockets, so a death on any host is heard by every rank at once; a host that falls silent is found by
//      keepalive.
//   2. A goodbye carries the number of collective calls its rank has made. It is a loss only for whoever needs that
//      rank in a later call.
//   3. Whoever learns of a failure first tells everyone; the first failure heard wins (FailureState).
//   4. A rank whose call takes long tells everyone which call it is. Ranks that wait for each other in different calls
//      find out so.
//   5. It also carries notes from rank to rank: a few words, reliably and in order, for whoever listens. The engine has
//      one channel for them, the inspection of stalls another. And descriptors of memory, between ranks of one host.
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

#include "bell.h"
#include "call.h"
#include "failure_state.h"
#include "shared_connections.h"
#include "watch_message.h"

namespace ronde {

class Watch : private SharedConnections::Member {
 public:
  // `names[rank]`: how errors call it. `communicator`: its number, alike on all its ranks and of no other; from here on
  // what they say is heard. `processes`: of its ranks.
  Watch(int rank, std::vector<std::string> names, std::shared_ptr<SharedConnections> connections, uint64_t communicator,
        std::vector<int> processes);
  ~Watch() override { stop(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  FailureState& failure() { return failure_; }
  // Rung when the communicator fails or a rank leaves.
  void set_bell(BellRope own);
  // The eventfd that wakes a rank of this host; -1: there is none.
  int eventfd_of(int rank) const { return connections_->bell(processes_[rank]); }

  // Gives a rank of this host a duplicate of a descriptor; of -1, word that there is none. Never blocks.
  void send_descriptor(int rank, int fd);
  // The next one from that rank, -1 if it has none, kNoRoom if this process had no room for it; nothing if none comes
  // within that time. Throws Failure.
  static constexpr int kNoRoom = -2;
  std::optional<int> receive_descriptor(int rank, int64_t timeout_ns);

  // Call number `number` (counted from 0) begins here. Throws Failure if a rank said goodbye before it.
  void begin_call(uint64_t number);
  // The call in progress takes long (rule 4). `talk`: if it is send or receive.
  struct Talk {
    int peer = -1;
    bool sends = false;
  };
  void tell_call(const Call& call, Talk talk, int64_t since_ns);
  // The call of which tell_call() has told is over.
  void end_call();
  struct LongCall {
    Call call;
    Talk talk;
    uint64_t number;       // of send and receive: so many messages have gone that way before
    int64_t since_ns = 0;  // of this rank's: when the wait began
  };
  // The call in progress, if it takes long.
  std::optional<LongCall> long_call();
  // How many messages have been sent or received that way.
  uint64_t messages(Talk talk) const {
    return talk.peer < 0 ? 0 : (talk.sends ? sent_to_ : received_from_)[talk.peer].load();
  }
  // A message has been sent or received.
  void note_talk(Talk talk) { (talk.sends ? sent_to_ : received_from_)[talk.peer].fetch_add(1); }
  // True if `rank` has said goodbye: it will neither send nor receive any more.
  bool has_left(int rank) const { return departures_[rank].load(std::memory_order_acquire) != kPresent; }
  const std::string& name(int rank) const { return names_[rank]; }

  // Who wants to hear of what the watch hears. Called by the watch's thread (on_change also by others): must not block.
  class Listener {
   public:
    virtual ~Listener() = default;
    // Throws ProtocolError if the note is malformed: then its sender counts as lost.
    virtual void on_note(int peer, std::span<const uint32_t> words) = 0;
    // The communicator has failed, or a rank has left.
    virtual void on_change() = 0;
    // The time that set_alarm() named has come.
    virtual void on_alarm() {}
    // This rank's call takes long: of the channel kStalls, called by the thread that waits.
    virtual void on_long_call() {}
  };
  enum class Channel { kEngine, kStalls };
  void set_listener(Listener* listener, Channel channel = Channel::kEngine);
  // Has the channel kStalls hear on_alarm() at this time (steady clock). Only within on_note() and on_alarm().
  void set_alarm(int64_t at_ns) { connections_->set_alarm(at_ns); }
  static constexpr size_t kNoteWords = WatchMessage::kNoteWords;
  // To `rank`'s listener: at most kNoteWords. Any thread; never blocks.
  void send_note(int rank, std::span<const uint32_t> words, Channel channel = Channel::kEngine);
  // How many calls this rank has begun.
  uint64_t calls_begun() const { return calls_begun_.load(std::memory_order_seq_cst); }
  // The process of a rank of this host as this process sees it, or 0.
  int process_of(int rank) { return connections_->pid_of(processes_[rank]); }
  // A rank that has left and takes no part in call number `number`, if there is one.
  std::optional<Failure> departed(uint64_t number) const;

  // A peer has sent a malformed message: it is lost, and all ranks learn why. Not within on_note(), which throws.
  void distrust(const ProtocolError& error);

  // Tells every rank what failed here, and wakes a call that waits here.
  void tell_all(const Failure& failure);
  void say_goodbye(uint64_t calls_made);
  // Leaves the communicator: to the others this is a failure unless say_goodbye() came first.
  void stop();
  // In a forked child: closes the connections and says nothing. Takes no lock, and must not be destroyed afterwards.
  void abandon();

 private:
  static constexpr uint64_t kPresent = WatchMessage::kNoCalls;
  using Message = WatchMessage;

  void hear(int process, std::span<const std::byte> bytes, Descriptor attached) override;
  void hear_end(int process, const SharedConnections::End& end) override;
  void hear_alarm() override;
  void give_up(int error) override;
  void handle(int peer, const Message& message);
  void hear_call(int peer, const Message& message);
  void hear_note(int peer, const Message& message);
  void hear_descriptor(int peer, const Message& message, Descriptor attached);
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
  std::map<int, int> ranks_;    // by process: those of the others
  FailureState failure_;

  std::mutex sending_;
  bool has_left_ = false;  // guarded by sending_: after it nothing is sent
  bool said_goodbye_ = false;
  std::mutex receiving_;
  std::condition_variable received_;
  std::map<int, std::deque<int>> descriptors_;  // by rank, as receive_descriptor() returns them; guarded by receiving_

  std::mutex listening_;
  std::optional<BellRope> own_;                        // guarded by listening_, as are the listeners
  Listener* listeners_[WatchMessage::kChannels] = {};  // by channel
  std::vector<std::atomic<uint64_t>> departures_;      // per rank: the calls it made before it left, or kPresent
  std::atomic<int> left_count_{0};
  std::vector<std::atomic<uint64_t>> sent_to_, received_from_;  // by rank: messages of send and receive
  std::atomic<uint64_t> calls_begun_{0};
  std::mutex calls_;                    // guards the three below
  std::map<int, LongCall> long_calls_;  // by rank: the last one that it told of
  std::optional<LongCall> long_call_;   // this rank's last one
  bool is_in_long_call_ = false;
  bool is_abandoned_ = false;
};

}  // namespace ronde
