// The messages that mailboxes exchange over a link: what is queued, and what follows from what has arrived.
#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "communicator/run_call.h"
#include "messages/mailbox.h"

namespace ronde {
namespace {

// How long the goodbye of a rank may take to arrive after the end of its link.
constexpr int kGoodbyePatienceMs = 300;

// How the links' frames announce headers, which always carry tags because they determine memory, and their bytes.
Call call_of_header() { return with_tags(make_call(Kind::kSendRecv, DType::kUint8), true); }
Call call_of_bytes() { return make_call(Kind::kSendRecv, DType::kUint8); }

}  // namespace

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

}  // namespace ronde
