#include "watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "block_signals.h"
#include "steady_clock.h"

namespace ronde {
namespace {

// Small enough for any receive buffer, whatever the kernel adds to each message.
constexpr uint64_t kMostUnread = 16;
constexpr uint64_t kReadAtOnce = 8;  // messages read for which one answer goes back

}  // namespace

Watch::Watch(int rank, std::vector<std::string> names, std::map<int, Connection> controls, BellRope own,
             FailureState& failure)
    : rank_(rank),
      names_(std::move(names)),
      controls_(std::move(controls)),
      own_(own),
      failure_(failure),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      departures_(names_.size()),
      sent_to_(names_.size()),
      received_from_(names_.size()) {
  if (wake_.get() < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  for (auto& departure : departures_) departure.store(kPresent, std::memory_order_relaxed);
  if (controls_.empty()) return;
  for (const auto& [peer, control] : controls_) {
    if (control.keys) seals_.emplace(peer, *control.keys);
    // Wake up for whole messages only: TCP may deliver one in two halves.
    const int low_water = static_cast<int>(wire_bytes(peer));
    setsockopt(control.socket.get(), SOL_SOCKET, SO_RCVLOWAT, &low_water, sizeof(low_water));
  }
  const BlockSignals block;
  thread_ = std::make_unique<std::thread>([this] { run(); });
}

void Watch::stop() {
  if (is_abandoned_) return;
  if (thread_) {
    stopping_.store(true);
    wake_thread();
    thread_->join();
    thread_.reset();
  }
  std::lock_guard lock(sending_);
  for (const auto& [peer, control] : controls_) {
    for (const Message& message : std::exchange(flows_[peer].held, {})) transmit(peer, message);
    flush(peer);
  }
  controls_.clear();
}

void Watch::abandon() {
  is_abandoned_ = true;
  for (auto& [peer, control] : controls_) control.socket.reset();
  wake_.reset();
}

void Watch::wake_thread() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

// This thread says what it has begun, then looks who has left; run() notes who has left, then looks what has begun.
// Both orders are sequentially consistent, so at least one of the two sees the other.
void Watch::begin_call(uint64_t number) {
  calls_begun_.store(number + 1, std::memory_order_seq_cst);
  failure_.check();
  if (left_count_.load(std::memory_order_seq_cst) == 0) [[likely]] {
    return;
  }
  for (const auto& [peer, control] : controls_) {
    if (departures_[peer].load(std::memory_order_seq_cst) <= number) {
      report(FailureKind::kPeerLost, peer, departure_reason(peer));
    }
  }
  failure_.check();
}

void Watch::say_goodbye(uint64_t calls_made) {
  Message message;
  message.type = Message::Type::kGoodbye;
  message.calls_made = calls_made;
  send_to_all(message);
}

void Watch::tell_all(const Failure& failure) {
  Message message;
  message.type = Message::Type::kFailure;
  message.failure_kind = static_cast<int32_t>(failure.kind);
  message.rank = failure.rank;
  message.missing_count = static_cast<int32_t>(std::min(failure.missing.size(), Message::kMissing));
  std::copy_n(failure.missing.begin(), message.missing_count, message.missing);
  message.set_reason(failure.what());
  send_to_all(message);
  own_.ring();
  notify_listeners();
}

void Watch::set_listener(Listener* listener, Channel channel) {
  std::lock_guard lock(listening_);
  listeners_[static_cast<int>(channel)] = listener;
}

void Watch::notify_listeners() {
  std::lock_guard lock(listening_);
  for (Listener* listener : listeners_) {
    if (listener != nullptr) listener->on_change();
  }
}

void Watch::send_note(int rank, std::span<const uint32_t> words, Channel channel) {
  Message message;
  message.type = Message::Type::kNote;
  message.rank = static_cast<int32_t>(channel);
  message.missing_count = static_cast<int32_t>(words.size());
  if (!words.empty()) std::memcpy(message.reason, words.data(), words.size_bytes());
  std::lock_guard lock(sending_);
  send_to(rank, message);
}

std::optional<Failure> Watch::departed(uint64_t number) const {
  if (left_count_.load(std::memory_order_seq_cst) == 0) return std::nullopt;
  for (int peer = 0; peer < static_cast<int>(departures_.size()); ++peer) {
    if (departures_[peer].load(std::memory_order_seq_cst) <= number) {
      return Failure(FailureKind::kPeerLost, peer, departure_reason(peer));
    }
  }
  return std::nullopt;
}

void Watch::tell_call(const Call& call, Talk talk, int64_t since_ns) {
  const LongCall ours{call, talk, messages(talk), since_ns};
  std::map<int, LongCall> theirs;
  {
    std::lock_guard lock(calls_);
    long_call_ = ours;
    is_in_long_call_ = true;
    theirs = long_calls_;
  }
  for (const auto& [rank, other] : theirs) compare(rank, other, ours);
  Message message;
  message.type = Message::Type::kLongCall;
  message.call = call;
  message.rank = talk.peer;
  message.missing_count = talk.sends ? 1 : 0;
  message.calls_made = ours.number;
  send_to_all(message);
  std::lock_guard lock(listening_);
  Listener* const listener = listeners_[static_cast<int>(Channel::kStalls)];
  if (listener != nullptr) listener->on_long_call();
}

void Watch::end_call() {
  std::lock_guard lock(calls_);
  is_in_long_call_ = false;
}

std::optional<Watch::LongCall> Watch::long_call() {
  std::lock_guard lock(calls_);
  return is_in_long_call_ ? long_call_ : std::nullopt;
}

// Calls of the same number must be the same. A rank that is in an earlier or later one may well be on its way. Send and
// receive have the number of the next collective call: whoever waits in that one waits for this rank too. Unless the
// message has gone its way meanwhile, which the other of the two knows: so that one judges.
void Watch::compare(int peer, const LongCall& theirs, const LongCall& ours) {
  if (theirs.call.sequence != ours.call.sequence || theirs.call == ours.call) return;
  if (ours.call.kind == Kind::kSendRecv) return;
  if (theirs.call.kind == Kind::kSendRecv) {
    const bool is_with_us = theirs.talk.peer == rank_;
    if (!is_with_us || messages({peer, !theirs.talk.sends}) > theirs.number) return;
  }
  const bool first = peer < rank_;
  report(FailureKind::kMismatch, peer,
         describe_mismatch(first ? peer : rank_, first ? theirs.call : ours.call, first ? rank_ : peer,
                           first ? ours.call : theirs.call));
}

void Watch::send_to_all(const Message& message) {
  std::lock_guard lock(sending_);
  for (const auto& [peer, control] : controls_) send_to(peer, message);
}

// In order, and as much as the peer has room for. With sending_ held.
void Watch::send_to(int peer, const Message& message) {
  if (!controls_.contains(peer) || flows_[peer].is_over) return;
  flows_[peer].held.push_back(message);
  send_what_fits(peer);
}

void Watch::send_what_fits(int peer) {
  Flow& flow = flows_[peer];
  while (!flow.held.empty() && flow.sent - flow.read < kMostUnread) {
    ++flow.sent;
    transmit(peer, flow.held.front());
    flow.held.pop_front();
  }
}

void Watch::hear_read(int peer, uint64_t count) {
  std::lock_guard lock(sending_);
  Flow& flow = flows_[peer];
  if (count < flow.read || count > flow.sent) throw ProtocolError(peer, "a number of messages read that cannot be");
  flow.read = count;
  send_what_fits(peer);
}

// Else what others go on saying to a rank that has left would be held for ever.
void Watch::end_flow(int peer) {
  std::lock_guard lock(sending_);
  flows_[peer].is_over = true;
  flows_[peer].held.clear();
}

void Watch::tell_read(int peer, Inbox& inbox) {
  if (++inbox.read % kReadAtOnce != 0) return;
  Message message;
  message.type = Message::Type::kRead;
  message.calls_made = inbox.read;
  std::lock_guard lock(sending_);
  transmit(peer, message);
}

// What the socket does not take at once, because its peer has not read for long, follows when it does. Whoever is gone
// need not be told. With sending_ held.
void Watch::transmit(int peer, const Message& message) {
  const auto control = controls_.find(peer);
  if (control == controls_.end()) return;
  std::string& backlog = backlog_[peer];
  const bool was_empty = backlog.empty();
  char bytes[sizeof(message) + kTagBytes];
  std::memcpy(bytes, &message, sizeof(message));
  const std::span wire(bytes, wire_bytes(peer));
  const auto seals = seals_.find(peer);
  if (seals != seals_.end()) seals->second.seal(std::as_writable_bytes(wire));
  backlog.append(wire.data(), wire.size());
  if (!was_empty) return;
  flush(peer);
  if (!backlog.empty()) wake_thread();
}

void Watch::flush(int peer) {
  std::string& backlog = backlog_[peer];
  while (!backlog.empty()) {
    // Message by message, so that a Unix socket never takes a part of one.
    const size_t rest = backlog.size() % wire_bytes(peer);
    const size_t bytes = rest == 0 ? wire_bytes(peer) : rest;
    const ssize_t sent = send(controls_.at(peer).socket.get(), backlog.data(), bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) {
      backlog.erase(0, static_cast<size_t>(sent));
    } else {
      if (errno != EAGAIN && errno != EINTR) backlog.clear();
      if (errno != EINTR) return;
    }
  }
}

void Watch::run() {
  std::vector<int> peers;
  std::vector<Inbox> inboxes(controls_.size());
  std::vector<pollfd> fds;
  for (const auto& [peer, control] : controls_) {
    peers.push_back(peer);
    fds.push_back({control.socket.get(), POLLIN, 0});
  }
  fds.push_back({wake_.get(), POLLIN, 0});
  while (true) {
    if (poll(fds.data(), fds.size(), poll_limit_ms()) < 0) {
      if (errno == EINTR) continue;
      return give_up(errno);
    }
    if (stopping_.load()) return;
    ring_alarm();
    if (fds.back().revents != 0) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof(count));
    }
    for (size_t i = 0; i < peers.size(); ++i) {
      // A negative descriptor is skipped by poll(): nothing more comes from there.
      if ((fds[i].revents & ~POLLOUT) != 0 && !hear(peers[i], fds[i].fd, inboxes[i])) fds[i].fd = -1;
    }
    std::lock_guard lock(sending_);
    for (size_t i = 0; i < peers.size(); ++i) {
      if (!backlog_[peers[i]].empty()) flush(peers[i]);
      fds[i].events = static_cast<short>(backlog_[peers[i]].empty() ? POLLIN : POLLIN | POLLOUT);
    }
  }
}

// Nobody would hear of a lost rank any more: so nobody goes on.
void Watch::give_up(int error) {
  report(FailureKind::kAborted, rank_,
         names_[rank_] + " cannot watch the other ranks any more: poll: " + std::generic_category().message(error) +
             (error == EINVAL ? " (was the limit of open files, `ulimit -n`, lowered?)" : ""));
}

int Watch::poll_limit_ms() const {
  if (alarm_ns_ == 0) return -1;
  return static_cast<int>(std::max<int64_t>((alarm_ns_ - steady_now_ns()) / 1'000'000 + 1, 0));
}

void Watch::ring_alarm() {
  if (alarm_ns_ == 0 || steady_now_ns() < alarm_ns_) return;
  alarm_ns_ = 0;
  std::lock_guard lock(listening_);
  Listener* const listener = listeners_[static_cast<int>(Channel::kStalls)];
  if (listener != nullptr) listener->on_alarm();
}

int Watch::process_of(int rank) {
  std::lock_guard lock(sending_);
  const auto control = controls_.find(rank);
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (control == controls_.end() ||
      getsockopt(control->second.socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    return 0;
  }
  return peer.pid;
}

bool Watch::hear(int peer, int fd, Inbox& inbox) {
  const std::span wire(inbox.bytes.data(), wire_bytes(peer));
  const ssize_t got = recv(fd, wire.data() + inbox.filled, wire.size() - inbox.filled, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (got <= 0) {  // what has come of a message before is of no use: its sender died while it was under way
    const int error = got < 0 ? errno : 0;
    end_flow(peer);
    lost(peer, error);
    return false;
  }
  inbox.filled += static_cast<size_t>(got);
  if (inbox.filled < wire.size()) return true;
  inbox.filled = 0;
  const auto seals = seals_.find(peer);
  if (seals != seals_.end() && !seals->second.open(wire)) {
    report(FailureKind::kPeerLost, peer, names_[peer] + " was lost: " + kAltered);
    return false;
  }
  try {
    const Message message = Message::parse(wire.first(sizeof(Message)), peer, static_cast<int>(names_.size()));
    if (message.type == Message::Type::kRead) {
      hear_read(peer, message.calls_made);
    } else {
      tell_read(peer, inbox);
      handle(peer, message);
    }
  } catch (const ProtocolError& error) {
    distrust(error);
    return false;
  }
  return true;
}

void Watch::handle(int peer, const Message& message) {
  if (message.type == Message::Type::kGoodbye) {
    note_departure(peer, message.calls_made);
    return;
  }
  if (message.type == Message::Type::kLongCall) {
    const LongCall theirs{message.call, {message.rank, message.missing_count != 0}, message.calls_made};
    std::optional<LongCall> ours;
    {
      std::lock_guard lock(calls_);
      long_calls_[peer] = theirs;
      ours = long_call_;
    }
    if (ours) compare(peer, theirs, *ours);
    return;
  }
  if (message.type == Message::Type::kNote) return hear_note(peer, message);
  const int culprit = message.rank >= 0 ? message.rank : peer;
  // Its sender has told everybody: no need to pass it on.
  failure_.set(
      Failure(static_cast<FailureKind>(message.failure_kind), culprit, message.reason_text(), message.missing_ranks()));
  own_.ring();
  notify_listeners();
}

void Watch::hear_note(int peer, const Message& message) {
  const auto count = static_cast<size_t>(message.missing_count);
  uint32_t words[kNoteWords];
  std::memcpy(words, message.reason, count * sizeof(uint32_t));
  std::lock_guard lock(listening_);
  Listener* const listener = listeners_[message.rank];
  if (listener != nullptr) listener->on_note(peer, {words, count});
}

void Watch::distrust(const ProtocolError& error) {
  report(FailureKind::kPeerLost, error.peer,
         names_[error.peer] + " sent " + error.what() + ": do all ranks run the same version of Ronde?");
}

void Watch::note_departure(int peer, uint64_t calls_made) {
  departures_[peer].store(calls_made, std::memory_order_seq_cst);
  left_count_.fetch_add(1, std::memory_order_seq_cst);
  if (calls_begun_.load(std::memory_order_seq_cst) > calls_made) {
    report(FailureKind::kPeerLost, peer, departure_reason(peer));
  }
  own_.ring();
  notify_listeners();
}

void Watch::lost(int peer, int error) {
  if (has_left(peer)) return;
  std::string reason = names_[peer] + " was lost: ";
  if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH) {
    reason += "its host cannot be reached any more";
  } else {
    reason += "its process ended without shutting down";
  }
  report(FailureKind::kPeerLost, peer, reason);
}

void Watch::report(FailureKind kind, int rank, const std::string& reason) {
  const Failure failure(kind, rank, reason);
  if (failure_.set(failure)) tell_all(failure);
}

std::string Watch::departure_reason(int peer) const {
  return names_[peer] + " has shut down after " + std::to_string(departures_[peer].load()) +
         " collective calls and takes no part in this one";
}

}  // namespace ronde
