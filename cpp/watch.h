// The failure detector: one thread that listens on a control connection to every other rank, and sleeps otherwise.
//
// The rules:
//   1. End of file, or an error, without a goodbye means that the rank is lost. The kernel closes a dead process's
//      sockets, so a death on any host is heard by every rank at once; a host that falls silent is found by keepalive.
//   2. A goodbye carries the number of collective calls its rank has made. It is a loss only for whoever needs that
//      rank in a later call.
//   3. Whoever learns of a failure first tells everyone; the first failure heard wins (FailureState).
//   4. A rank whose call takes long tells everyone which call it is. Ranks that wait for each other in different calls
//      find out so.
//   5. Between hosts every message carries a tag (sealer.h). One that does not fit was altered on its way: its sender
//      counts as lost, because what it says can no longer be believed.
//   6. It also carries notes from rank to rank: a few words, reliably and in order, for whoever listens. The engine has
//      one channel for them, the inspection of stalls another.
// A rank that is merely stopped keeps its connections, so it is waited for. For that nothing may stay unsent in the
// kernel because its receive buffer is full: TCP_USER_TIMEOUT, by which an unreachable host is noticed, takes a window
// that stays closed for the same. So a rank says what it has read, and nobody has more than some messages unread there;
// the others wait here.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "bell.h"
#include "call.h"
#include "connection.h"
#include "failure_state.h"
#include "watch_message.h"

namespace ronde {

class Watch {
 public:
  // `controls`: the connections by rank. `names[rank]`: how errors call it.
  Watch(int rank, std::vector<std::string> names, std::map<int, Connection> controls, BellRope own,
        FailureState& failure);
  ~Watch() { stop(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

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
  void set_alarm(int64_t at_ns) { alarm_ns_ = at_ns; }
  static constexpr size_t kNoteWords = WatchMessage::kNoteWords;
  // To `rank`'s listener: at most kNoteWords. Any thread; never blocks.
  void send_note(int rank, std::span<const uint32_t> words, Channel channel = Channel::kEngine);
  // How many calls this rank has begun.
  uint64_t calls_begun() const { return calls_begun_.load(std::memory_order_seq_cst); }
  // The process of a rank of this host as this process sees it, or 0.
  int process_of(int rank);
  // A rank that has left and takes no part in call number `number`, if there is one.
  std::optional<Failure> departed(uint64_t number) const;

  // A peer has sent a malformed message: it is lost, and all ranks learn why. Not within on_note(), which throws.
  void distrust(const ProtocolError& error);

  // Tells every rank what failed here, and wakes a call that waits here.
  void tell_all(const Failure& failure);
  void say_goodbye(uint64_t calls_made);
  // Ends the thread and closes the connections: to the others this looks like a death unless say_goodbye() came first.
  void stop();
  // In a forked child, where the thread does not exist: closes the connections and says nothing. Takes no lock, and
  // must not be destroyed afterwards.
  void abandon();

 private:
  static constexpr uint64_t kPresent = WatchMessage::kNoCalls;
  using Message = WatchMessage;

  // What has come of a peer's next message.
  struct Inbox {
    std::array<std::byte, sizeof(Message) + kTagBytes> bytes;
    size_t filled = 0;
    uint64_t read = 0;  // messages, without those of kRead
  };
  void run();
  // False when nothing more will come from this peer.
  bool hear(int peer, int fd, Inbox& inbox);
  // The bytes of a message on its way to and from this peer.
  size_t wire_bytes(int peer) const { return sizeof(Message) + (seals_.contains(peer) ? kTagBytes : 0); }
  void handle(int peer, const Message& message);
  void hear_note(int peer, const Message& message);
  void lost(int peer, int error);
  void report(FailureKind kind, int rank, const std::string& reason);
  void send_to_all(const Message& message);
  void send_to(int peer, const Message& message);
  void transmit(int peer, const Message& message);
  void send_what_fits(int peer);
  void hear_read(int peer, uint64_t count);
  void end_flow(int peer);
  void tell_read(int peer, Inbox& inbox);
  void flush(int peer);
  void notify_listeners();
  void give_up(int error);
  int poll_limit_ms() const;
  void ring_alarm();
  void wake_thread() const;
  void note_departure(int peer, uint64_t calls_made);
  void compare(int peer, const LongCall& theirs, const LongCall& ours);
  std::string departure_reason(int peer) const;

  int rank_;
  std::vector<std::string> names_;
  std::map<int, Connection> controls_;  // unchanged while the thread runs
  // By rank on another host. Sealing is guarded by sending_, opening is the thread's.
  std::map<int, SealedConnection> seals_;
  // Towards one peer: whole messages, without those of kRead.
  struct Flow {
    uint64_t sent = 0, read = 0;
    std::deque<Message> held;  // until the peer has read more
    bool is_over = false;      // the peer has closed the connection: it reads nothing any more
  };
  std::map<int, Flow> flows_;           // by rank; guarded by sending_
  std::mutex sending_;                  // whole messages only, and none after stop()
  std::map<int, std::string> backlog_;  // by rank: what its socket has not taken yet; guarded by sending_
  BellRope own_;
  FailureState& failure_;
  Descriptor wake_;  // makes the thread look at the backlog, and whether it shall stop
  std::atomic<bool> stopping_{false};
  std::mutex listening_;
  Listener* listeners_[WatchMessage::kChannels] = {};  // by channel
  int64_t alarm_ns_ = 0;                               // of the thread; 0: none
  std::vector<std::atomic<uint64_t>> departures_;      // per rank: the calls it made before it left, or kPresent
  std::atomic<int> left_count_{0};
  std::vector<std::atomic<uint64_t>> sent_to_, received_from_;  // by rank: messages of send and receive
  std::atomic<uint64_t> calls_begun_{0};
  std::mutex calls_;                    // guards the three below
  std::map<int, LongCall> long_calls_;  // by rank: the last one that it told of
  std::optional<LongCall> long_call_;   // this rank's last one
  bool is_in_long_call_ = false;
  std::unique_ptr<std::thread> thread_;
  bool is_abandoned_ = false;
};

}  // namespace ronde
