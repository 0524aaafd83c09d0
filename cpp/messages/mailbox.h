// A mailbox: point-to-point messages with tags, which any thread posts at any time and in any order without blocking.
//
// It takes over the links of one communicator for good: from then on no thread makes calls on that communicator. All
// ranks of the communicator create a mailbox, which receives from then on.
//
// The rules of messages:
//   1. A receive matches the first message, in order of arrival, with its context and tag from its peer, or from any of
//      its peers. Messages of one sender, context and tag arrive in the order of their sends. An arriving message goes
//      to the first receive posted that matches.
//   2. Sizes must agree. If they do not, the receive fails with kMismatch, the message is lost, and the mailbox goes
//   on.
//   3. A send is done when its memory may be reused, a receive when its bytes are there. Their memory must live until
//      then, or until they have failed.
//   4. A message of up to kEagerBytes is sent at once, and a rank without a receive for it keeps it in memory of its
//      own. There is no limit for the number of these. A longer one is only offered; its bytes follow in parts, between
//      which other messages pass, once the receiver has accepted it, and go straight into their destination.
//
// Failures:
//   - Like every communicator, this one fails as a whole when a rank is lost or aborts: then all pending and later
//     messages fail with its failure. Messages that are done stay done.
//   - A rank that shuts its communicator down leaves: pending messages to and from it fail with kPeerLost, as do
//     receives from any rank once all their peers have left. Those that it had sent before still arrive.
//   - cancel() fails the messages of a context on this rank only. Those whose bytes a link is moving fail a moment
//     later, when the link has released them, which takes a peer that is not stopped. close() fails all at once; then
//     shut the communicator down, which tells the other ranks.
//
// Threads: a mutex guards everything, and the thread that holds it may drive the links. A post moves what it can. A
// thread in wait() drives: first it looks again and again, then it sleeps on the bell (bell.h). So at most one thread
// sleeps there; other waiting threads sleep until their messages have ended. The mailbox's own thread sleeps on the
// bell whenever no waiting thread drives. Otherwise it is parked. While a thread looks, the bell counts as awake, so
// that peers need not wake the sleeper; the last such thread announces the sleep again.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "communicator/communicator.h"
#include "links/link.h"
#include "system/inherited.h"
#include "waiting/bell.h"

namespace ronde {

class Mailbox : private Communicator::LinkUser {
 public:
  static constexpr int kAnyPeer = -1;
  static constexpr size_t kEagerBytes = size_t{64} << 10;

  // A posted send or receive: pending, then done or failed, exactly once.
  class Message {
   public:
    bool is_pending() const { return state_.load(std::memory_order_acquire) == kPending; }
    bool has_failed() const { return state_.load(std::memory_order_acquire) == kFailed; }
    const Failure& failure() const { return *failure_; }  // once it has failed
    int source() const { return source_; }                // of a receive that is done

   private:
    friend Mailbox;
    static constexpr uint32_t kPending = 0, kDone = 1, kFailed = 2;

    bool accepts(int source) const;
    void finish(uint32_t state);
    bool sleep(int64_t most_ns);  // false: at a signal, or at the time

    std::atomic<uint32_t> state_{kPending};
    std::atomic<uint32_t> sleepers_{0};
    int peer_ = kAnyPeer;
    std::vector<int> peers_;  // of a receive from any of these
    uint64_t context_ = 0;
    uint32_t tag_ = 0;
    std::byte* data_ = nullptr;  // not written while sending
    size_t bytes_ = 0;
    int source_ = kAnyPeer;
    std::optional<Failure> failure_;  // written before state_
    std::optional<Failure> doom_;     // it fails with this once the links have released its memory
  };
  using Handle = std::shared_ptr<Message>;

  explicit Mailbox(Communicator& communicator);
  ~Mailbox() override;

  // Throw UsageError if the arguments are invalid. Everything else fails the message.
  Handle send(int peer, uint64_t context, uint32_t tag, const void* data, size_t bytes);
  Handle receive(int peer, uint64_t context, uint32_t tag, void* data, size_t bytes, std::vector<int> peers = {});

  // Waits until the message has ended, or the time is over (steady clock), or a signal comes, or for a second: the
  // caller checks which.
  void wait(Message& message, int64_t until_ns);

  // Fails all pending and later messages of this context on this rank, with kAborted.
  void cancel(uint64_t context, const std::string& reason);
  // Fails all pending and later messages with kAborted, and ends the thread.
  void close(const std::string& reason);
  // For a forked child: later posts throw UsageError. The destructor must not run; the owner leaks the object.
  void abandon() { is_abandoned_.store(true); }
  bool is_abandoned() const { return is_abandoned_.load() || origin_.is_inherited(); }

 private:
  static constexpr size_t kPartBytes = size_t{1} << 20;
  static constexpr int kPartsUnderWay = 2;

  // Begins every message between two mailboxes. In its memory layout: little endian, like every supported machine.
  struct Header {
    enum class Type : uint32_t {
      kEager = 1,     // the message's bytes follow
      kOffer = 2,     // a long message; number: counts the offers to this receiver from 1
      kAccept = 3,    // of the offer with this number: a receive has been posted
      kRefuse = 4,    // the receiver does not want it
      kPart = 5,      // the next `bytes` bytes of it follow
      kWithdraw = 6,  // after kAccept: the sender sends no more of it
    };
    uint64_t context = 0;
    uint64_t number = 0;
    uint64_t bytes = 0;
    uint32_t tag = 0;
    Type type = Type::kEager;
  };
  static_assert(sizeof(Header) == 32);

  struct Key {
    uint64_t context;
    uint32_t tag;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return (key.context ^ key.tag * 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9;
    }
  };

  // A message without a receive when its header arrived.
  struct Arrival {
    int source = kAnyPeer;
    size_t bytes = 0;
    uint64_t offer = 0;                   // its number
    std::unique_ptr<std::byte[]> copy{};  // of an eager message
    bool is_complete = true;              // all of the copy is there
    Handle own_send{};                    // of a long message from this rank to itself
    Handle receive{};                     // that waits for the rest of the copy
  };
  // The messages of one context and tag.
  struct Box {
    std::deque<Handle> receives;
    std::deque<std::shared_ptr<Arrival>> arrivals;
  };
  using Boxes = std::unordered_map<Key, Box, KeyHash>;

  struct LongSend {
    Handle message{};
    size_t queued = 0;  // bytes
    int parts_under_way = 0;
    bool is_accepted = false;
  };
  struct LongReceive {
    Handle message{};  // null: the rest is discarded
    size_t bytes = 0;
    size_t arrived = 0;
    bool is_arriving = false;  // the link writes into the message's memory
  };
  // What a link sends: a header, perhaps with bytes behind it.
  struct Outgoing {
    Header header;
    Ticket ticket = 0;
    Handle message{};  // of an eager message
  };
  // What a link receives. Of the members behind `ticket` and `bytes` at most one is set; if none is, it is a header, or
  // bytes to discard.
  struct Incoming {
    Ticket ticket = 0;
    bool is_header = false;
    Handle message{};                    // receives an eager message
    std::shared_ptr<Arrival> arrival{};  // keeps one
    uint64_t offer = 0;                  // a part of it
    size_t bytes = 0;
  };
  struct Peer {
    Link* link = nullptr;  // null: this rank
    bool has_left = false;
    std::deque<Outgoing> outgoing;
    uint64_t offers_made = 0;
    std::map<uint64_t, LongSend> offers;
    std::set<uint64_t> withdrawn;  // offers cancelled before the receiver's answer
    Header arriving;
    std::deque<Incoming> incoming;
    uint64_t offers_received = 0;
    std::map<uint64_t, LongReceive> accepted;
    std::vector<std::byte> discarded;  // bytes of messages without a receiver
  };

  void release_links() override;
  int rank() const { return communicator_.rank(); }
  std::string name_of(int rank) const;
  void check_usable(int peer) const;
  Handle new_message(int peer, uint64_t context, uint32_t tag, const void* data, size_t bytes) const;
  Failure aborted(const std::string& reason) const { return Failure(FailureKind::kAborted, rank(), reason); }
  Failure departed(int peer) const;
  std::optional<Failure> failure_of(const Message& message) const;

  void post_send(const Handle& message);
  void send_to_self(const Handle& message);
  void post_receive(const Handle& message);
  Handle take_receive(const Key& key, int source);
  void deliver(const Handle& message, const std::shared_ptr<Arrival>& arrival);
  bool check_size(const Handle& message, int source, size_t bytes);
  void erase_if_empty(const Key& key);

  void queue(Peer& peer, const Header& header, const void* data = nullptr, size_t bytes = 0, Handle message = nullptr);
  void queue_parts(Peer& peer, uint64_t number, LongSend& send);
  void expect_header(Peer& peer);
  void expect(Peer& peer, void* data, Incoming incoming);
  std::byte* discard(Peer& peer, size_t bytes);

  bool step(bool looks_at_sockets);
  bool step_peer(int rank);
  bool take_finished(int rank);
  void take_rest(int rank);
  void take_sent(Peer& peer, Outgoing& sent);
  void take_received(int rank, Incoming& received);
  void take_header(int rank, const Header& header);
  void take_eager(int rank, const Header& header);
  void take_offer(int rank, const Header& header);
  void take_answer(int rank, const Header& header);
  void take_part(int rank, const Header& header);
  void take_withdrawal(int rank, const Header& header);
  bool leaves(int rank);
  void drop_peer(int rank);

  void end(const Handle& message, int source = kAnyPeer);
  void fail(const Handle& message, const Failure& failure);
  void finish(Message& message, uint32_t state);
  template <class Visit>
  void visit_messages(Visit&& visit);
  void fail_all(const Failure& failure);
  void fail_if_unreachable(Boxes::iterator box);

  void run();
  void park(std::unique_lock<std::mutex>& lock);
  enum class Sleeper { kNobody, kThread, kWaiting };
  bool sleep_on_bell(std::unique_lock<std::mutex>& lock, Sleeper sleeper, int64_t until_ns);
  bool look_at_sockets(const Doorbell& doorbell, int timeout_ms, std::unique_lock<std::mutex>* lock = nullptr);
  bool is_busy() const;
  int most_looks() const;
  enum class Drive { kSlept, kAnotherDrives, kInterrupted };
  Drive drive(Message& message, int64_t until_ns);
  Drive look_and_sleep(std::unique_lock<std::mutex>& lock, Message& message, int64_t until_ns, int looks,
                       bool& has_slept_long);
  bool look(std::unique_lock<std::mutex>& lock, const Message& message, int64_t end_ns, int most);
  void stop_driving(bool has_slept_long);
  void wake_for_sockets();
  void wake_sleeper();

  Communicator& communicator_;
  const ForkOrigin origin_;
  std::atomic<bool> is_abandoned_{false};
  Communicator::TakenLinks links_;
  Doorbell thread_doorbell_, waiting_doorbell_;

  std::mutex mutex_;  // guards all below
  std::vector<Peer> peers_;
  Boxes boxes_;
  std::map<uint64_t, std::string> cancelled_;  // contexts and their reasons
  size_t pending_ = 0;                         // messages
  int departures_ = 0;                         // ranks that have left
  std::optional<Failure> failure_;             // of all messages; from then on nothing touches the links
  bool is_closed_ = false;
  int looking_ = 0;                     // threads in wait() that look
  int driving_ = 0;                     // those, and the one that sleeps on the bell
  bool has_driven_ = false;             // a waiting thread, since the mailbox's thread has looked
  Sleeper sleeper_ = Sleeper::kNobody;  // on the bell
  Message* awaited_ = nullptr;          // for which that waiting thread sleeps
  bool is_parked_ = false;
  std::condition_variable unparked_;
  std::mutex joining_;
  std::thread thread_;
};

}  // namespace ronde
