#include "messages/mailbox.h"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/steady_clock.h"
#include "communicator/run_call.h"
#include "links/mesh.h"
#include "system/block_signals.h"
#include "system/futex.h"
#include "waiting/waiter.h"

namespace ronde {
namespace {

// A waiting thread checks for signals this often: while it moves bytes, and while it sleeps.
constexpr int64_t kLookNs = 50'000'000;
constexpr int64_t kCheckNs = 1'000'000'000;
// For how long the mailbox's thread stays parked before it looks whether waiting threads still drive.
constexpr auto kShortestPark = std::chrono::milliseconds(1);
constexpr auto kLongestPark = std::chrono::milliseconds(64);
constexpr int64_t kLongSleepNs = 1'000'000;
// How long the goodbye of a rank may take to arrive after the end of its link.
constexpr int kGoodbyePatienceMs = 300;

// How the links' frames announce headers, which always carry tags because they determine memory, and their bytes.
Call call_of_header() { return with_tags(make_call(Kind::kSendRecv, DType::kUint8), true); }
Call call_of_bytes() { return make_call(Kind::kSendRecv, DType::kUint8); }

}  // namespace

// --- Messages --------------------------------------------------------------------------------------------------------

bool Mailbox::Message::accepts(int source) const {
  return peer_ == source || (peer_ == kAnyPeer && std::ranges::find(peers_, source) != peers_.end());
}

void Mailbox::Message::finish(uint32_t state) {
  state_.store(state, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake_all(state_);
}

bool Mailbox::Message::sleep(int64_t most_ns) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  const bool woken = futex_sleep(state_, kPending, most_ns);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return woken;
}

void Mailbox::end(const Handle& message, int source) {
  if (message->doom_) return fail(message, *message->doom_);
  message->source_ = source;
  --pending_;
  finish(*message, Message::kDone);
}

void Mailbox::fail(const Handle& message, const Failure& failure) {
  message->failure_ = failure;
  --pending_;
  finish(*message, Message::kFailed);
}

void Mailbox::finish(Message& message, uint32_t state) {
  message.finish(state);
  if (awaited_ != &message) return;
  awaited_ = nullptr;
  wake_sleeper();
}

// --- Life ------------------------------------------------------------------------------------------------------------

Mailbox::Mailbox(Communicator& communicator)
    : communicator_(communicator),
      links_(communicator.take_links(*this)),
      thread_doorbell_(links_.bell.eventfd()),
      waiting_doorbell_(links_.bell.eventfd()),
      peers_(static_cast<size_t>(communicator.size())) {
  for (int peer = 0; peer < communicator_.size(); ++peer) {
    if (peer == rank()) continue;
    peers_[peer].link = &links_.mesh.link(peer);
    expect_header(peers_[peer]);
  }
  const BlockSignals block;
  thread_ = std::thread([this] { run(); });
}

Mailbox::~Mailbox() {
  close("the mailbox has been closed");
  communicator_.return_links();
}

void Mailbox::release_links() { close("the communicator of the mailbox has been shut down"); }

void Mailbox::close(const std::string& reason) {
  if (is_abandoned()) return;
  {
    std::lock_guard lock(mutex_);
    fail_all(aborted(reason));
    if (!is_closed_ && sleeper_ != Sleeper::kNobody) wake_sleeper();
    is_closed_ = true;
    unparked_.notify_all();
  }
  std::lock_guard lock(joining_);
  if (thread_.joinable()) thread_.join();
}

// --- Posts -----------------------------------------------------------------------------------------------------------

std::string Mailbox::name_of(int rank) const {
  return "rank " + std::to_string(rank) + " on " + communicator_.host(rank);
}

void Mailbox::check_usable(int peer) const {
  if (is_abandoned()) throw UsageError("this mailbox belongs to the parent of this forked process");
  if (peer < 0 || peer >= communicator_.size()) {
    throw UsageError("there is no rank " + std::to_string(peer) + ": the mailbox has ranks 0 to " +
                     std::to_string(communicator_.size() - 1));
  }
}

Mailbox::Handle Mailbox::new_message(int peer, uint64_t context, uint32_t tag, const void* data, size_t bytes) const {
  auto message = std::make_shared<Message>();
  message->peer_ = peer;
  message->context_ = context;
  message->tag_ = tag;
  message->data_ = static_cast<std::byte*>(const_cast<void*>(data));
  message->bytes_ = bytes;
  return message;
}

Failure Mailbox::departed(int peer) const {
  return Failure(FailureKind::kPeerLost, peer, name_of(peer) + " has shut down");
}

// Why a new message fails at once.
std::optional<Failure> Mailbox::failure_of(const Message& message) const {
  if (failure_) return failure_;
  const auto cancelled = cancelled_.find(message.context_);
  if (cancelled != cancelled_.end()) return aborted(cancelled->second);
  return std::nullopt;
}

Mailbox::Handle Mailbox::send(int peer, uint64_t context, uint32_t tag, const void* data, size_t bytes) {
  check_usable(peer);
  Handle message = new_message(peer, context, tag, data, bytes);
  std::lock_guard lock(mutex_);
  ++pending_;
  if (const auto failure = failure_of(*message)) {
    fail(message, *failure);
  } else if (peers_[peer].has_left) {
    fail(message, departed(peer));
  } else {
    post_send(message);
    wake_for_sockets();
  }
  return message;
}

Mailbox::Handle Mailbox::receive(int peer, uint64_t context, uint32_t tag, void* data, size_t bytes,
                                 std::vector<int> peers) {
  if (peer == kAnyPeer) {
    if (peers.empty()) throw UsageError("a receive from any rank needs the ranks that may send");
    for (const int each : peers) check_usable(each);
  } else {
    check_usable(peer);
  }
  Handle message = new_message(peer, context, tag, data, bytes);
  message->peers_ = std::move(peers);
  std::lock_guard lock(mutex_);
  ++pending_;
  if (const auto failure = failure_of(*message)) {
    fail(message, *failure);
  } else {
    post_receive(message);
    wake_for_sockets();
  }
  return message;
}

void Mailbox::post_send(const Handle& message) {
  const int to = message->peer_;
  Peer& peer = peers_[to];
  if (peer.link == nullptr) return send_to_self(message);
  Header header{.context = message->context_, .bytes = message->bytes_, .tag = message->tag_};
  if (message->bytes_ <= kEagerBytes) {
    queue(peer, header, message->data_, message->bytes_, message);
  } else {
    header.type = Header::Type::kOffer;
    header.number = ++peer.offers_made;
    peer.offers[header.number] = {.message = message};
    queue(peer, header);
  }
  step_peer(to);
}

void Mailbox::send_to_self(const Handle& message) {
  const Key key{message->context_, message->tag_};
  if (const Handle receive = take_receive(key, rank())) {
    if (check_size(receive, rank(), message->bytes_)) {
      if (message->bytes_ > 0) std::memcpy(receive->data_, message->data_, message->bytes_);
      end(receive, rank());
    }
    return end(message);
  }
  auto arrival = std::make_shared<Arrival>(Arrival{.source = rank(), .bytes = message->bytes_});
  boxes_[key].arrivals.push_back(arrival);
  if (message->bytes_ > kEagerBytes) {
    arrival->own_send = message;
    return;
  }
  arrival->copy = std::make_unique_for_overwrite<std::byte[]>(message->bytes_);
  if (message->bytes_ > 0) std::memcpy(arrival->copy.get(), message->data_, message->bytes_);
  end(message);
}

void Mailbox::post_receive(const Handle& message) {
  const Key key{message->context_, message->tag_};
  Box& box = boxes_[key];
  const auto found = std::ranges::find_if(
      box.arrivals, [&](const auto& arrival) { return !arrival->receive && message->accepts(arrival->source); });
  if (found == box.arrivals.end()) {
    box.receives.push_back(message);
    if (departures_ > 0) fail_if_unreachable(boxes_.find(key));
    return;
  }
  const std::shared_ptr<Arrival> arrival = *found;
  if (arrival->is_complete) {
    box.arrivals.erase(found);
    erase_if_empty(key);
  }
  deliver(message, arrival);
  if (arrival->offer != 0) step_peer(arrival->source);
}

// Fails the receives that no rank can serve any more: those from ranks that have left.
void Mailbox::fail_if_unreachable(Boxes::iterator box) {
  std::deque<Handle>& receives = box->second.receives;
  for (auto each = receives.begin(); each != receives.end();) {
    const Handle message = *each;
    const auto has_left = [&](int peer) { return peers_[peer].has_left; };
    const bool is_from_any = message->peer_ == kAnyPeer;
    if (is_from_any ? std::ranges::all_of(message->peers_, has_left) : has_left(message->peer_)) {
      each = receives.erase(each);
      fail(message, departed(is_from_any ? message->peers_.back() : message->peer_));
    } else {
      ++each;
    }
  }
  if (receives.empty() && box->second.arrivals.empty()) boxes_.erase(box);
}

void Mailbox::erase_if_empty(const Key& key) {
  const auto box = boxes_.find(key);
  if (box->second.receives.empty() && box->second.arrivals.empty()) boxes_.erase(box);
}

// The first receive that a message matches, or null.
Mailbox::Handle Mailbox::take_receive(const Key& key, int source) {
  const auto box = boxes_.find(key);
  if (box == boxes_.end()) return nullptr;
  std::deque<Handle>& receives = box->second.receives;
  const auto found = std::ranges::find_if(receives, [&](const Handle& each) { return each->accepts(source); });
  if (found == receives.end()) return nullptr;
  Handle message = std::move(*found);
  receives.erase(found);
  erase_if_empty(key);
  return message;
}

// Fails the receive if the sizes differ. Returns whether they agree.
bool Mailbox::check_size(const Handle& message, int source, size_t bytes) {
  if (message->bytes_ == bytes) return true;
  fail(message, Failure(FailureKind::kMismatch, source,
                        "rank " + std::to_string(source) + " sends " + std::to_string(bytes) + " bytes with tag " +
                            std::to_string(message->tag_) + ", but rank " + std::to_string(rank()) + " receives " +
                            std::to_string(message->bytes_) + " bytes: the sizes must agree"));
  return false;
}

// Gives a receive the message that has arrived, or whatever of it has.
void Mailbox::deliver(const Handle& message, const std::shared_ptr<Arrival>& arrival) {
  const bool fits = check_size(message, arrival->source, arrival->bytes);
  if (arrival->offer != 0) {
    Peer& peer = peers_[arrival->source];
    using enum Header::Type;
    queue(peer, {.context = message->context_,
                 .number = arrival->offer,
                 .tag = message->tag_,
                 .type = fits ? kAccept : kRefuse});
    if (fits) peer.accepted[arrival->offer] = {.message = message, .bytes = arrival->bytes};
    return;
  }
  if (arrival->own_send) {
    if (fits) {
      std::memcpy(message->data_, arrival->own_send->data_, arrival->bytes);
      end(message, rank());
    }
    return end(arrival->own_send);
  }
  if (!arrival->is_complete) {
    // take_received() finds it there. A receive that does not fit has taken the message all the same.
    arrival->receive = message;
    return;
  }
  if (!fits) return;
  if (arrival->bytes > 0) std::memcpy(message->data_, arrival->copy.get(), arrival->bytes);
  end(message, arrival->source);
}

// --- Ends ------------------------------------------------------------------------------------------------------------

void Mailbox::cancel(uint64_t context, const std::string& reason) {
  if (is_abandoned()) return;
  std::lock_guard lock(mutex_);
  if (failure_ || !cancelled_.emplace(context, reason).second) return;
  const Failure failure = aborted(reason);
  for (auto box = boxes_.begin(); box != boxes_.end();) {
    if (box->first.context != context) {
      ++box;
      continue;
    }
    for (const Handle& receive : box->second.receives) fail(receive, failure);
    for (const auto& arrival : box->second.arrivals) {
      if (arrival->own_send) fail(arrival->own_send, failure);
      if (arrival->receive && arrival->receive->is_pending()) fail(arrival->receive, failure);
      if (arrival->offer != 0)
        queue(peers_[arrival->source], {.number = arrival->offer, .type = Header::Type::kRefuse});
    }
    box = boxes_.erase(box);
  }
  const auto is_of_context = [&](const Handle& message) { return message && message->context_ == context; };
  for (Peer& peer : peers_) {
    // The links may read and write the memory of these for a moment more.
    for (Outgoing& each : peer.outgoing) {
      if (is_of_context(each.message)) each.message->doom_ = failure;
    }
    for (Incoming& each : peer.incoming) {
      if (is_of_context(each.message)) each.message->doom_ = failure;
    }
    for (auto& [number, receive] : peer.accepted) {
      if (!is_of_context(receive.message)) continue;
      if (receive.is_arriving) {
        receive.message->doom_ = failure;
      } else {
        fail(std::exchange(receive.message, nullptr), failure);
      }
    }
    for (auto each = peer.offers.begin(); each != peer.offers.end();) {
      LongSend& send = each->second;
      if (is_of_context(send.message) && !send.is_accepted) {
        fail(send.message, failure);
        peer.withdrawn.insert(each->first);
        each = peer.offers.erase(each);
        continue;
      }
      if (is_of_context(send.message)) send.message->doom_ = failure;
      ++each;
    }
  }
  for (int peer = 0; peer < communicator_.size(); ++peer) step_peer(peer);
  wake_for_sockets();
}

template <class Visit>
void Mailbox::visit_messages(Visit&& visit) {
  const auto visit_pending = [&](const Handle& message) {
    if (message && message->is_pending()) visit(message);
  };
  for (auto& [key, box] : boxes_) {
    for (const Handle& receive : box.receives) visit_pending(receive);
    for (const auto& arrival : box.arrivals) {
      visit_pending(arrival->own_send);
      visit_pending(arrival->receive);
    }
  }
  for (Peer& peer : peers_) {
    for (const Outgoing& each : peer.outgoing) visit_pending(each.message);
    for (const Incoming& each : peer.incoming) visit_pending(each.message);
    for (auto& [number, receive] : peer.accepted) visit_pending(receive.message);
    for (auto& [number, send] : peer.offers) visit_pending(send.message);
  }
}

// From here on nothing touches the links, nor the memory of messages.
void Mailbox::fail_all(const Failure& failure) {
  if (failure_) return;
  failure_ = failure;
  visit_messages([&](const Handle& message) { fail(message, failure); });
  boxes_.clear();
  for (Peer& peer : peers_) {
    peer.accepted.clear();
    peer.offers.clear();
    peer.withdrawn.clear();
  }
}

// Whether the end of its link was preceded by the rank's goodbye, which takes another connection.
bool Mailbox::leaves(int rank) {
  Watch& watch = communicator_.watch();
  for (int waited_ms = 0; waited_ms < kGoodbyePatienceMs; ++waited_ms) {
    if (watch.has_left(rank)) return true;
    if (communicator_.has_failed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

// A rank has left, and all that it had sent has arrived.
void Mailbox::drop_peer(int rank) {
  Peer& peer = peers_[rank];
  peer.has_left = true;
  ++departures_;
  const Failure failure = departed(rank);
  const auto fail_pending = [&](const Handle& message) {
    if (message && message->is_pending()) fail(message, failure);
  };
  for (const Outgoing& each : peer.outgoing) fail_pending(each.message);
  for (const Incoming& each : peer.incoming) {
    fail_pending(each.message);
    if (each.arrival) fail_pending(each.arrival->receive);
  }
  for (auto& [number, receive] : peer.accepted) fail_pending(receive.message);
  for (auto& [number, send] : peer.offers) fail_pending(send.message);
  peer.accepted.clear();
  peer.offers.clear();
  peer.withdrawn.clear();
  for (auto box = boxes_.begin(); box != boxes_.end();) {
    std::erase_if(box->second.arrivals, [&](const auto& arrival) {
      return arrival->source == rank && (arrival->offer != 0 || !arrival->is_complete);
    });
    fail_if_unreachable(box++);
  }
}

// --- Links -----------------------------------------------------------------------------------------------------------

void Mailbox::queue(Peer& peer, const Header& header, const void* data, size_t bytes, Handle message) {
  if (peer.has_left) return;
  Outgoing& outgoing = peer.outgoing.emplace_back(Outgoing{.header = header, .message = std::move(message)});
  outgoing.ticket = peer.link->send(call_of_header(), &outgoing.header, sizeof(Header));
  if (bytes > 0) outgoing.ticket = peer.link->send(call_of_bytes(), data, bytes);
}

// Keeps a few parts of a long message under way, so that the link always has something to send and other messages pass
// between them.
void Mailbox::queue_parts(Peer& peer, uint64_t number, LongSend& send) {
  const Message& message = *send.message;
  while (send.parts_under_way < kPartsUnderWay && send.queued < message.bytes_ && !message.doom_) {
    const size_t bytes = std::min(kPartBytes, message.bytes_ - send.queued);
    queue(peer, {.number = number, .bytes = bytes, .type = Header::Type::kPart}, message.data_ + send.queued, bytes);
    send.queued += bytes;
    ++send.parts_under_way;
  }
}

void Mailbox::expect_header(Peer& peer) {
  const Ticket ticket = peer.link->recv(call_of_header(), &peer.arriving, sizeof(Header));
  peer.incoming.push_back({.ticket = ticket, .is_header = true});
}

void Mailbox::expect(Peer& peer, void* data, Incoming incoming) {
  incoming.ticket = peer.link->recv(call_of_bytes(), data, incoming.bytes);
  peer.incoming.push_back(std::move(incoming));
}

std::byte* Mailbox::discard(Peer& peer, size_t bytes) {
  // Links keep pointers into it.
  if (peer.discarded.empty()) peer.discarded.resize(kPartBytes);
  return bytes <= kPartBytes ? peer.discarded.data() : nullptr;
}

// Moves what can be moved now. Returns whether anything was.
bool Mailbox::step(bool looks_at_sockets) {
  if (failure_) return false;
  try {
    communicator_.check_failure();
    if (looks_at_sockets && links_.has_sockets) look_at_sockets(waiting_doorbell_, 0);
  } catch (...) {
    fail_all(communicator_.fail_links(std::current_exception()));
    return false;
  }
  bool moved = false;
  for (int peer = 0; peer < communicator_.size(); ++peer) moved |= step_peer(peer);
  return moved;
}

bool Mailbox::step_peer(int rank) {
  Peer& peer = peers_[rank];
  if (failure_ || peer.link == nullptr || peer.has_left) return false;
  try {
    const bool has_left = communicator_.watch().has_left(rank);
    bool moved = false;
    try {
      moved = peer.link->progress();
    } catch (const Failure& failure) {
      if (failure.kind != FailureKind::kPeerLost || !leaves(rank)) throw;
      take_rest(rank);
      drop_peer(rank);
      return true;
    }
    moved |= take_finished(rank);
    if (has_left && !moved && !peer.link->has_end_of_file()) drop_peer(rank);
    return moved;
  } catch (...) {
    fail_all(communicator_.fail_links(std::current_exception()));
    return false;
  }
}

// After the end of a link: takes the messages that had arrived before.
void Mailbox::take_rest(int rank) {
  while (take_finished(rank)) {
    try {
      peers_[rank].link->progress();
    } catch (const Failure&) {
      // the same again, after it has moved what it has read
    }
  }
}

bool Mailbox::take_finished(int rank) {
  Peer& peer = peers_[rank];
  bool took = false;
  while (!peer.outgoing.empty() && peer.link->sent() >= peer.outgoing.front().ticket) {
    Outgoing sent = std::move(peer.outgoing.front());
    peer.outgoing.pop_front();
    take_sent(peer, sent);
    took = true;
  }
  while (!peer.incoming.empty() && peer.link->received() >= peer.incoming.front().ticket) {
    Incoming received = std::move(peer.incoming.front());
    peer.incoming.pop_front();
    take_received(rank, received);
    took = true;
  }
  return took;
}

void Mailbox::take_sent(Peer& peer, Outgoing& sent) {
  if (sent.message) end(sent.message);
  if (sent.header.type != Header::Type::kPart) return;
  const auto found = peer.offers.find(sent.header.number);
  LongSend& send = found->second;
  --send.parts_under_way;
  queue_parts(peer, found->first, send);
  if (send.parts_under_way > 0) return;
  if (send.queued < send.message->bytes_) {
    queue(peer, {.number = found->first, .type = Header::Type::kWithdraw});
  }
  end(send.message);
  peer.offers.erase(found);
}

void Mailbox::take_received(int rank, Incoming& received) {
  Peer& peer = peers_[rank];
  if (received.is_header) {
    const Header header = peer.arriving;
    take_header(rank, header);
    return expect_header(peer);
  }
  if (received.message) return end(received.message, rank);
  if (received.arrival) {
    Arrival& arrival = *received.arrival;
    arrival.is_complete = true;
    if (!arrival.receive) return;
    const Handle receive = std::exchange(arrival.receive, nullptr);
    const Key key{receive->context_, receive->tag_};
    const auto box = boxes_.find(key);
    if (box != boxes_.end()) {
      std::erase(box->second.arrivals, received.arrival);
      erase_if_empty(key);
    }
    if (receive->is_pending()) deliver(receive, received.arrival);
    return;
  }
  if (received.offer == 0) return;
  const auto found = peer.accepted.find(received.offer);
  LongReceive& receive = found->second;
  receive.arrived += received.bytes;
  receive.is_arriving = false;
  const bool is_over = receive.arrived == receive.bytes;
  if (receive.message && (is_over || receive.message->doom_)) end(std::exchange(receive.message, nullptr), rank);
  if (is_over) peer.accepted.erase(found);
}

void Mailbox::take_header(int rank, const Header& header) {
  switch (header.type) {
    case Header::Type::kEager:
      return take_eager(rank, header);
    case Header::Type::kOffer:
      return take_offer(rank, header);
    case Header::Type::kAccept:
    case Header::Type::kRefuse:
      return take_answer(rank, header);
    case Header::Type::kPart:
      return take_part(rank, header);
    case Header::Type::kWithdraw:
      return take_withdrawal(rank, header);
  }
  throw ProtocolError(rank, "a message of type " + std::to_string(static_cast<uint32_t>(header.type)));
}

void Mailbox::take_eager(int rank, const Header& header) {
  if (header.bytes > kEagerBytes) {
    throw ProtocolError(rank, "a message of " + std::to_string(header.bytes) + " bytes that it had not offered");
  }
  Peer& peer = peers_[rank];
  const Key key{header.context, header.tag};
  if (cancelled_.contains(header.context)) {
    if (header.bytes > 0) expect(peer, discard(peer, header.bytes), {.bytes = header.bytes});
    return;
  }
  if (const Handle receive = take_receive(key, rank)) {
    const bool fits = check_size(receive, rank, header.bytes);
    if (header.bytes == 0) {
      if (fits) end(receive, rank);
    } else if (fits) {
      expect(peer, receive->data_, {.message = receive, .bytes = header.bytes});
    } else {
      expect(peer, discard(peer, header.bytes), {.bytes = header.bytes});
    }
    return;
  }
  auto arrival = std::make_shared<Arrival>(Arrival{.source = rank, .bytes = header.bytes});
  boxes_[key].arrivals.push_back(arrival);
  if (header.bytes == 0) return;
  arrival->copy = std::make_unique_for_overwrite<std::byte[]>(header.bytes);
  arrival->is_complete = false;
  expect(peer, arrival->copy.get(), {.arrival = arrival, .bytes = header.bytes});
}

void Mailbox::take_offer(int rank, const Header& header) {
  Peer& peer = peers_[rank];
  if (header.number != peer.offers_received + 1 || header.bytes <= kEagerBytes) {
    throw ProtocolError(rank, "offer number " + std::to_string(header.number) + " after " +
                                  std::to_string(peer.offers_received) + ", of " + std::to_string(header.bytes) +
                                  " bytes");
  }
  ++peer.offers_received;
  if (cancelled_.contains(header.context)) {
    return queue(peer, {.number = header.number, .type = Header::Type::kRefuse});
  }
  const Key key{header.context, header.tag};
  auto arrival = std::make_shared<Arrival>(Arrival{.source = rank, .bytes = header.bytes, .offer = header.number});
  if (const Handle receive = take_receive(key, rank)) return deliver(receive, arrival);
  boxes_[key].arrivals.push_back(std::move(arrival));
}

void Mailbox::take_answer(int rank, const Header& header) {
  Peer& peer = peers_[rank];
  const bool is_accepted = header.type == Header::Type::kAccept;
  if (peer.withdrawn.erase(header.number) > 0) {
    if (is_accepted) queue(peer, {.number = header.number, .type = Header::Type::kWithdraw});
    return;
  }
  const auto found = peer.offers.find(header.number);
  if (found == peer.offers.end() || found->second.is_accepted) {
    throw ProtocolError(rank, "an answer to offer number " + std::to_string(header.number) + ", which is not open");
  }
  if (is_accepted) {
    found->second.is_accepted = true;
    return queue_parts(peer, found->first, found->second);
  }
  end(found->second.message);
  peer.offers.erase(found);
}

void Mailbox::take_part(int rank, const Header& header) {
  Peer& peer = peers_[rank];
  const auto found = peer.accepted.find(header.number);
  if (found == peer.accepted.end() || header.bytes == 0 || header.bytes > kPartBytes ||
      header.bytes > found->second.bytes - found->second.arrived) {
    throw ProtocolError(rank, "a part of " + std::to_string(header.bytes) + " bytes of message number " +
                                  std::to_string(header.number) + ", which was not accepted");
  }
  LongReceive& receive = found->second;
  receive.is_arriving = true;
  std::byte* const data = receive.message ? receive.message->data_ + receive.arrived : discard(peer, header.bytes);
  expect(peer, data, {.offer = header.number, .bytes = header.bytes});
}

void Mailbox::take_withdrawal(int rank, const Header& header) {
  Peer& peer = peers_[rank];
  const auto found = peer.accepted.find(header.number);
  if (found == peer.accepted.end()) {
    throw ProtocolError(
        rank, "the withdrawal of message number " + std::to_string(header.number) + ", which was not accepted");
  }
  const Handle message = std::move(found->second.message);
  peer.accepted.erase(found);
  if (message) fail(message, Failure(FailureKind::kAborted, rank, name_of(rank) + " cancelled the message"));
}

// --- Threads ---------------------------------------------------------------------------------------------------------

// Whether messages are under way on the links, so that a driver should look again soon.
bool Mailbox::is_busy() const {
  return std::ranges::any_of(peers_, [](const Peer& peer) {
    return !peer.has_left && (!peer.outgoing.empty() || peer.incoming.size() > 1 || !peer.accepted.empty());
  });
}

// How often a thread looks in vain before it sleeps. Looking at sockets takes a system call.
int Mailbox::most_looks() const {
  const WaitPolicy& policy = links_.policy;
  return links_.has_sockets ? std::max(policy.spins / 64, 1) : policy.spins + policy.yields;
}

// With `lock`, releases it while it waits. Returns true if a signal has interrupted it.
bool Mailbox::look_at_sockets(const Doorbell& doorbell, int timeout_ms, std::unique_lock<std::mutex>* lock) {
  std::vector<pollfd> fds;
  fds.push_back({doorbell.descriptor(), POLLIN, 0});
  for (const Peer& peer : peers_) {
    if (peer.link != nullptr && !peer.has_left) peer.link->add_poll(fds);
  }
  if (lock != nullptr) lock->unlock();
  const int ready = poll(fds.data(), fds.size(), timeout_ms);
  const int error = errno;
  if (lock != nullptr) lock->lock();
  if (failure_) return false;  // the links may be gone
  if (ready < 0) {
    if (error == EINTR) return true;
    throw std::system_error(error, std::generic_category(), "poll");
  }
  if (fds[0].revents & POLLIN) doorbell.clear();
  std::span<const pollfd> found = std::span(fds).subspan(1);
  for (const Peer& peer : peers_) {
    if (peer.link != nullptr) found = found.subspan(peer.link->take_poll(found));
  }
  return false;
}

// The mailbox's thread.
void Mailbox::run() {
  std::unique_lock lock(mutex_);
  int looks = 0;
  while (!is_closed_) {
    if (driving_ > 0) {
      looks = 0;
      park(lock);
      continue;
    }
    const bool moved = step(links_.has_sockets && looks > 0);
    if (moved) looks = 1;
    if (moved || (looks > 0 && ++looks < most_looks() && is_busy())) {
      lock.unlock();
      looks < links_.policy.spins ? Waiter::pause() : static_cast<void>(sched_yield());
      lock.lock();
      continue;
    }
    looks = 0;
    sleep_on_bell(lock, Sleeper::kThread, INT64_MAX);
  }
}

// Leaves the links to the waiting threads. It looks now and then whether they still drive them, because a waiting
// thread that ends soon wakes it only if messages are pending: a program that waits often would otherwise wake it every
// time.
void Mailbox::park(std::unique_lock<std::mutex>& lock) {
  is_parked_ = true;
  auto patience = kShortestPark;
  do {
    unparked_.wait_for(lock, patience);
    patience = sleeper_ == Sleeper::kWaiting ? std::min(2 * patience, kLongestPark) : kShortestPark;
  } while (driving_ > 0 && !is_closed_);
  is_parked_ = false;
}

// Sleeps until there may be something to do, or until the time. Returns true if a signal has interrupted it.
bool Mailbox::sleep_on_bell(std::unique_lock<std::mutex>& lock, Sleeper sleeper, int64_t until_ns) {
  const uint32_t token = links_.bell.prepare(links_.has_sockets ? Sleep::kPoll : Sleep::kFutex);
  const bool moved = step(false);
  if (moved || failure_) {
    links_.bell.cancel();
    // Of a failed mailbox the thread sleeps until it is closed.
    if (sleeper == Sleeper::kThread && failure_ && !is_closed_) unparked_.wait(lock);
    return false;
  }
  sleeper_ = sleeper;
  if (looking_ > 0) links_.bell.cancel();  // stop_driving() announces the sleep
  const int64_t left_ns = until_ns == INT64_MAX ? -1 : std::max<int64_t>(until_ns - steady_now_ns(), 0);
  bool interrupted = false;
  if (links_.has_sockets) {
    const Doorbell& doorbell = sleeper == Sleeper::kThread ? thread_doorbell_ : waiting_doorbell_;
    try {
      const int timeout_ms = left_ns < 0 ? -1 : static_cast<int>((left_ns + 999'999) / 1'000'000);
      interrupted = look_at_sockets(doorbell, timeout_ms, &lock);
    } catch (...) {
      fail_all(communicator_.fail_links(std::current_exception()));
    }
  } else {
    lock.unlock();
    interrupted = links_.bell.await_ring(token, left_ns);
    lock.lock();
  }
  if (sleeper_ == sleeper) {  // a waiting thread takes the place of the mailbox's
    sleeper_ = Sleeper::kNobody;
    if (!is_closed_) links_.bell.cancel();
  }
  return interrupted;
}

void Mailbox::wait(Message& message, int64_t until_ns) {
  const int64_t soon_ns = std::min(until_ns, steady_now_ns() + kCheckNs);
  for (bool may_drive = !is_abandoned(); may_drive && message.is_pending();) {
    switch (drive(message, soon_ns)) {
      case Drive::kInterrupted:
        return;
      case Drive::kAnotherDrives: {
        const int64_t left_ns = soon_ns - steady_now_ns();
        if (left_ns > 0 && message.sleep(left_ns)) break;
        return;
      }
      case Drive::kSlept:
        may_drive = steady_now_ns() < soon_ns;
    }
  }
}

// Drives the links for a message: looks, then sleeps once.
Mailbox::Drive Mailbox::drive(Message& message, int64_t until_ns) {
  std::unique_lock lock(mutex_);
  if (failure_) return Drive::kSlept;
  ++driving_;
  if (looking_++ == 0 && sleeper_ != Sleeper::kNobody) links_.bell.cancel();
  const bool is_over = look(lock, message, until_ns);
  --looking_;
  Drive result = is_over ? Drive::kInterrupted : Drive::kSlept;
  bool has_slept_long = false;
  if (!is_over && !failure_ && message.is_pending()) {
    if (sleeper_ == Sleeper::kWaiting) {
      result = Drive::kAnotherDrives;
    } else {
      if (sleeper_ == Sleeper::kThread) wake_sleeper();  // it parks
      awaited_ = &message;
      const int64_t since_ns = steady_now_ns();
      if (sleep_on_bell(lock, Sleeper::kWaiting, until_ns)) result = Drive::kInterrupted;
      has_slept_long = steady_now_ns() - since_ns > kLongSleepNs;
      if (awaited_ == &message) awaited_ = nullptr;
      step(false);
    }
  }
  --driving_;
  if (!failure_) stop_driving(has_slept_long);
  return result;
}

// Looks until the message has ended, or in vain for a while. Returns true at `end_ns`.
bool Mailbox::look(std::unique_lock<std::mutex>& lock, const Message& message, int64_t end_ns) {
  end_ns = std::min(end_ns, steady_now_ns() + kLookNs);
  const int most = most_looks();
  for (int looks = 0; !failure_ && looks < most; ++looks) {
    const bool moved = step(looks > 0);
    if (!message.is_pending()) return false;
    lock.unlock();
    looks < links_.policy.spins ? Waiter::pause() : static_cast<void>(sched_yield());
    if (moved) looks = 0;
    const bool is_over = (moved || looks % 64 == 63) && steady_now_ns() >= end_ns;
    lock.lock();
    if (is_over) return true;
  }
  return false;
}

// Another thread may have to drive from here on.
void Mailbox::stop_driving(bool has_slept_long) {
  if (looking_ > 0) return;
  if (sleeper_ != Sleeper::kNobody) {
    links_.bell.prepare(links_.has_sockets ? Sleep::kPoll : Sleep::kFutex);
    while (step(false)) {  // what peers published before they could see the announcement
    }
    wake_for_sockets();
  } else if (is_parked_ && driving_ == 0 && (pending_ > 0 || has_slept_long)) {
    unparked_.notify_one();
  }
}

// The descriptors for which the sleeper waits may have changed.
void Mailbox::wake_for_sockets() {
  if (failure_ || !links_.has_sockets || looking_ > 0 || !is_busy()) return;
  if (sleeper_ != Sleeper::kNobody) {
    wake_sleeper();
  } else if (is_parked_) {
    unparked_.notify_one();
  }
}

void Mailbox::wake_sleeper() {
  links_.bell.prepare(links_.has_sockets ? Sleep::kPoll : Sleep::kFutex);
  links_.bell.ring();
}

}  // namespace ronde
