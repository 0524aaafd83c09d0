#include "messages/mailbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "links/mesh.h"
#include "system/block_signals.h"
#include "system/futex.h"

namespace ronde {
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

Mailbox::Mailbox(Communicator& communicator) try
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
} catch (...) {
  communicator.return_links();
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

}  // namespace ronde
