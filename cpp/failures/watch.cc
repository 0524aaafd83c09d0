#include "failures/watch.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

namespace ronde {

Watch::Watch(int rank, std::vector<std::string> names, std::shared_ptr<SharedConnections> connections,
             uint64_t communicator, std::vector<int> processes)
    : rank_(rank),
      names_(std::move(names)),
      connections_(std::move(connections)),
      communicator_(communicator),
      processes_(std::move(processes)),
      departures_(names_.size()),
      sent_to_(names_.size()),
      received_from_(names_.size()) {
  for (auto& departure : departures_) departure.store(kPresent, std::memory_order_relaxed);
  for (int peer = 0; peer < static_cast<int>(processes_.size()); ++peer) {
    if (peer != rank_) ranks_.emplace(processes_[peer], peer);
  }
  connections_->join(communicator_, *this);
}

void Watch::set_bell(BellHandle own) {
  std::lock_guard lock(listening_);
  own_ = own;
}

void Watch::stop() {
  if (is_abandoned_) return;
  {
    std::lock_guard lock(sending_);
    if (has_left_) return;
  }
  if (!has_sent_goodbye_) {
    announce_failure(
        Failure(FailureKind::kPeerLost, rank_, names_[rank_] + " was lost: it has given up this communicator"));
  }
  {
    std::lock_guard lock(sending_);
    has_left_ = true;
  }
  connections_->leave(communicator_);
  std::lock_guard lock(listening_);
  own_.reset();
  for (auto& [peer, descriptors] : descriptors_) {
    for (const int fd : descriptors) Descriptor(fd).reset();
  }
  descriptors_.clear();
}

void Watch::abandon() {
  is_abandoned_ = true;
  connections_->abandon();
}

// This thread publishes the call that it has begun, then checks which ranks have left. The connections' thread
// publishes a rank that has left, then checks which call has begun. All four operations are sequentially consistent, so
// at least one of the two threads sees the other.
void Watch::begin_call(uint64_t number) {
  calls_begun_.store(number + 1, std::memory_order_seq_cst);
  failure_.check();
  if (left_count_.load(std::memory_order_seq_cst) == 0) [[likely]] {
    return;
  }
  for (const auto& [process, peer] : ranks_) {
    if (departures_[peer].load(std::memory_order_seq_cst) <= number) {
      report(FailureKind::kPeerLost, peer, departure_reason(peer));
    }
  }
  failure_.check();
}

void Watch::send_goodbye(uint64_t calls_made) {
  Message message;
  message.type = Message::Type::kGoodbye;
  message.calls_made = calls_made;
  send_to_all(message);
  has_sent_goodbye_ = true;
}

void Watch::announce_failure(const Failure& failure) {
  Message message;
  message.type = Message::Type::kFailure;
  message.failure_kind = static_cast<int32_t>(failure.kind);
  message.rank = failure.rank;
  message.missing_count = static_cast<int32_t>(std::min(failure.missing.size(), Message::kMissing));
  std::copy_n(failure.missing.begin(), message.missing_count, message.missing);
  message.set_reason(failure.what());
  send_to_all(message);
  notify();
}

void Watch::set_listener(Listener* listener, Channel channel) {
  std::lock_guard lock(listening_);
  listeners_[static_cast<int>(channel)] = listener;
}

void Watch::notify() {
  {
    std::lock_guard lock(receiving_);
    received_.notify_all();
  }
  std::lock_guard lock(listening_);
  if (own_) own_->ring();
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

void Watch::announce_long_call(const Call& call, Direction direction, int64_t since_ns, std::string posted_at) {
  const LongCall ours{call, direction, messages(direction), since_ns, std::move(posted_at)};
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
  message.rank = direction.peer;
  message.missing_count = direction.sends ? 1 : 0;
  message.calls_made = ours.number;
  send_to_all(message);
  std::lock_guard lock(listening_);
  Listener* const listener = listeners_[static_cast<int>(Channel::kStalls)];
  if (listener != nullptr) listener->on_long_call();
}

void Watch::end_long_call() {
  std::lock_guard lock(calls_);
  is_in_long_call_ = false;
}

std::optional<Watch::LongCall> Watch::long_call() {
  std::lock_guard lock(calls_);
  return is_in_long_call_ ? long_call_ : std::nullopt;
}

// Calls of the same number must be equal. A rank in an earlier or later call may just not have arrived yet. A send or
// receive has the number of the next collective call: the rank at its other end, if it waits in that collective, waits
// for this rank, too. That is a mismatch unless the message has arrived meanwhile, which the other end knows. So of the
// two the rank in the collective compares.
void Watch::compare(int peer, const LongCall& theirs, const LongCall& ours) {
  if (theirs.call.sequence != ours.call.sequence || theirs.call == ours.call) return;
  if (ours.call.kind == Kind::kSendRecv) return;
  if (theirs.call.kind == Kind::kSendRecv) {
    const bool is_with_us = theirs.direction.peer == rank_;
    if (!is_with_us || messages({peer, !theirs.direction.sends}) > theirs.number) return;
  }
  const bool first = peer < rank_;
  report(FailureKind::kMismatch, peer,
         describe_mismatch(first ? peer : rank_, first ? theirs.call : ours.call, first ? rank_ : peer,
                           first ? ours.call : theirs.call));
}

void Watch::send_to_all(const Message& message) {
  for (const auto& [process, peer] : ranks_) send_to(peer, message);
}

void Watch::send_to(int peer, Message message, Descriptor attached) {
  message.communicator = communicator_;
  std::lock_guard lock(sending_);
  if (!has_left_) connections_->send(processes_[peer], message, std::move(attached));
}

// --- Descriptors -----------------------------------------------------------------------------------------------------

void Watch::send_descriptor(int rank, int fd) {
  Message message;
  message.type = Message::Type::kDescriptor;
  message.missing_count = fd < 0 ? 0 : 1;
  Descriptor duplicate;
  if (fd >= 0) {
    duplicate = Descriptor(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (duplicate.get() < 0) throw std::system_error(errno, std::generic_category(), "dup");
  }
  send_to(rank, message, std::move(duplicate));
}

std::optional<int> Watch::receive_descriptor(int rank, int64_t timeout_ns) {
  std::unique_lock lock(receiving_);
  std::deque<int>& arrived = descriptors_[rank];
  received_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return !arrived.empty() || failure_.failed(); });
  if (arrived.empty()) {
    failure_.check();
    return std::nullopt;
  }
  const int fd = arrived.front();
  arrived.pop_front();
  return fd;
}

// --- In the connections' thread --------------------------------------------------------------------------------------

void Watch::on_message(int process, std::span<const std::byte> bytes, Descriptor attached) {
  const auto peer = ranks_.find(process);
  if (peer == ranks_.end()) throw ProtocolError(-1, "a message for a communicator of which it is not a rank");
  const Message message = Message::parse(bytes, peer->second, static_cast<int>(names_.size()));
  if (message.type == Message::Type::kDescriptor) return handle_descriptor(peer->second, message, std::move(attached));
  handle_message(peer->second, message);
}

void Watch::on_end(int process, const SharedConnections::End& end) {
  const auto peer = ranks_.find(process);
  if (peer == ranks_.end() || (!end.is_violation && has_left(peer->second))) return;
  report(FailureKind::kPeerLost, peer->second, names_[peer->second] + end.what);
}

void Watch::on_alarm() {
  std::lock_guard lock(listening_);
  Listener* const listener = listeners_[static_cast<int>(Channel::kStalls)];
  if (listener != nullptr) listener->on_alarm();
}

void Watch::on_poll_error(int error) {
  report(FailureKind::kAborted, rank_,
         names_[rank_] + " cannot watch the other ranks any more: poll: " + std::generic_category().message(error) +
             (error == EINVAL ? " (was the limit of open files, `ulimit -n`, lowered?)" : ""));
}

void Watch::handle_message(int peer, const Message& message) {
  if (message.type == Message::Type::kGoodbye) {
    note_departure(peer, message.calls_made);
    return;
  }
  if (message.type == Message::Type::kLongCall) return handle_long_call(peer, message);
  if (message.type == Message::Type::kNote) return handle_note(peer, message);
  const int culprit = message.rank >= 0 ? message.rank : peer;
  // Its sender has announced it to all ranks, so there is no need to forward it.
  failure_.set(
      Failure(static_cast<FailureKind>(message.failure_kind), culprit, message.reason_text(), message.missing_ranks()));
  notify();
}

void Watch::handle_long_call(int peer, const Message& message) {
  const LongCall theirs{message.call, {message.rank, message.missing_count != 0}, message.calls_made};
  std::optional<LongCall> ours;
  {
    std::lock_guard lock(calls_);
    long_calls_[peer] = theirs;
    ours = long_call_;
  }
  if (ours) compare(peer, theirs, *ours);
}

void Watch::handle_note(int peer, const Message& message) {
  const auto count = static_cast<size_t>(message.missing_count);
  uint32_t words[kNoteWords];
  std::memcpy(words, message.reason, count * sizeof(uint32_t));
  std::lock_guard lock(listening_);
  Listener* const listener = listeners_[message.rank];
  if (listener != nullptr) listener->on_note(peer, {words, count});
}

void Watch::handle_descriptor(int peer, const Message& message, Descriptor attached) {
  const bool is_promised = message.missing_count != 0;
  std::lock_guard lock(receiving_);
  descriptors_[peer].push_back(is_promised && attached.get() < 0 ? kNoRoom : attached.release());
  received_.notify_all();
}

void Watch::distrust(const ProtocolError& error) {
  report(FailureKind::kPeerLost, error.peer, names_[error.peer] + distrust_of(error));
}

void Watch::note_departure(int peer, uint64_t calls_made) {
  departures_[peer].store(calls_made, std::memory_order_seq_cst);
  left_count_.fetch_add(1, std::memory_order_seq_cst);
  if (calls_begun_.load(std::memory_order_seq_cst) > calls_made) {
    report(FailureKind::kPeerLost, peer, departure_reason(peer));
  }
  notify();
}

void Watch::report(FailureKind kind, int rank, const std::string& reason) {
  const Failure failure(kind, rank, reason);
  if (failure_.set(failure)) announce_failure(failure);
}

std::string Watch::departure_reason(int peer) const {
  return names_[peer] + " has shut down after " + std::to_string(departures_[peer].load()) +
         " collective calls and takes no part in this one";
}

}  // namespace ronde
