#include "failures/shared_connections.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/steady_clock.h"
#include "system/block_signals.h"

namespace ronde {
namespace {

// This many messages fit into any receive buffer, with the kernel's overhead for each.
constexpr uint64_t kMostUnread = 16;
constexpr std::chrono::seconds kClosedLimit{1};
constexpr uint64_t kReadAtOnce = 8;  // messages per acknowledgement

// Room for exactly one descriptor beside the bytes of a message.
union Attachment {
  cmsghdr header;
  char bytes[CMSG_SPACE(sizeof(int))];
};

ssize_t send_with(int fd, std::span<const std::byte> bytes, const Descriptor& attached) {
  iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  Attachment attachment{};
  if (attached.get() >= 0) {
    message.msg_control = &attachment;
    message.msg_controllen = sizeof(attachment.bytes);
    attachment.header = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    const int number = attached.get();
    std::memcpy(CMSG_DATA(&attachment.header), &number, sizeof(number));
  }
  return sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t receive_with(int fd, std::span<std::byte> bytes, Descriptor& attached) {
  iovec piece{bytes.data(), bytes.size()};
  Attachment attachment{};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = &attachment;
  message.msg_controllen = CMSG_LEN(sizeof(int));
  const ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  const cmsghdr* const header = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int number = -1;
    std::memcpy(&number, CMSG_DATA(header), sizeof(number));
    attached = Descriptor(number);
  }
  return got;
}

// ETOOMANYREFS: the user has more descriptors in flight than a process may open; it passes when some are received.
bool may_succeed_later(int error) { return error == EAGAIN || error == EINTR || error == ETOOMANYREFS; }

SharedConnections::End end_by(int error) {
  const bool is_unreachable = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
  return {std::string(" was lost: ") +
          (is_unreachable ? "its host cannot be reached any more" : "its process ended without shutting down")};
}

}  // namespace

SharedConnections::SharedConnections(std::map<int, Connection> controls)
    : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_.get() < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  insert(std::move(controls));
}

void SharedConnections::add(std::map<int, Connection> controls) {
  std::lock_guard lock(joining_);
  if (is_over_) throw UsageError("this process has left its world");
  {
    std::lock_guard adding(sending_);
    for (const auto& [process, control] : controls) {
      if (controls_.contains(process)) throw UsageError("a process has two control connections");
    }
    insert(std::move(controls));
  }
  if (thread_) {
    wake_thread();
  } else if (!members_.empty()) {
    start_thread();
  }
}

void SharedConnections::insert(std::map<int, Connection> controls) {
  for (auto& [process, control] : controls) {
    flows_[process];
    added_.push_back(process);
    if (control.keys) seals_.emplace(process, *control.keys);
    // Wakes the thread for whole messages only: TCP may deliver one in two parts.
    const int low_water = static_cast<int>(wire_bytes(process));
    setsockopt(control.socket.get(), SOL_SOCKET, SO_RCVLOWAT, &low_water, sizeof(low_water));
    controls_.emplace(process, std::move(control));
  }
}

void SharedConnections::join(uint64_t communicator, Member& member) {
  std::lock_guard lock(joining_);
  if (is_over_) throw UsageError("this process has left its world");
  if (!members_.emplace(communicator, &member).second) throw UsageError("two communicators have the same name");
  for (const auto& [process, end] : ends_) member.on_end(process, end);
  start_thread();
}

// With joining_ held.
void SharedConnections::start_thread() {
  if (thread_ || controls_.empty()) return;
  const BlockSignals block;
  thread_ = std::make_unique<std::thread>([this, ending = ending_] {
    run(*ending);
    ending->end();
  });
}

void SharedConnections::leave(uint64_t communicator) {
  {
    std::lock_guard lock(joining_);
    members_.erase(communicator);
    if (!members_.empty()) return;
    is_over_ = true;
  }
  stop();
}

void SharedConnections::stop() {
  if (thread_) end_thread();
  std::lock_guard lock(sending_);
  for (auto& [process, flow] : flows_) {
    for (Outgoing& outgoing : std::exchange(flow.held, {})) transmit(process, std::move(outgoing));
    flush(process);
  }
  flows_.clear();
  controls_.clear();
}

// If the program has closed all descriptors, nothing wakes a thread that is in poll(2). It is left there.
void SharedConnections::end_thread() {
  {
    std::unique_lock lock(ending_->mutex);
    ending_->is_wanted = true;
    wake_thread();
    const auto has_ended = [this] { return ending_->has_ended; };
    if (!ending_->changed.wait_for(lock, kClosedLimit, has_ended)) {
      ending_->changed.wait(lock, [this] { return ending_->has_ended || ending_->is_polling; });
    }
    if (!ending_->has_ended) thread_->detach();
  }
  if (thread_->joinable()) thread_->join();
  thread_.reset();
}

bool SharedConnections::Ending::begin_poll() {
  std::lock_guard lock(mutex);
  is_polling = !is_wanted;
  return is_polling;
}

bool SharedConnections::Ending::end_poll() {
  std::lock_guard lock(mutex);
  is_polling = false;
  return !is_wanted;
}

void SharedConnections::Ending::end() {
  std::lock_guard lock(mutex);
  has_ended = true;
  changed.notify_all();
}

void SharedConnections::abandon() {
  for (auto& [process, control] : controls_) control.socket.reset();
  for (auto& [process, bell] : bells_) bell.reset();
  wake_.reset();
}

const Descriptor* SharedConnections::bell(int process) const {
  const auto found = bells_.find(process);
  return found == bells_.end() ? nullptr : &found->second;
}

int SharedConnections::pid_of(int process) {
  std::lock_guard lock(sending_);
  const auto control = controls_.find(process);
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (control == controls_.end() ||
      getsockopt(control->second.socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    return 0;
  }
  return peer.pid;
}

bool SharedConnections::has_ended(int process) {
  std::lock_guard lock(joining_);
  const auto end = ends_.find(process);
  return end != ends_.end() && !end->second.is_violation;
}

void SharedConnections::wake_thread() const {
  const uint64_t one = 1;
  if (!wake_.is_open()) return;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

// --- Sending, with sending_ held -------------------------------------------------------------------------------------

void SharedConnections::send(int process, const WatchMessage& message, Descriptor attached) {
  std::lock_guard lock(sending_);
  const auto flow = flows_.find(process);
  if (flow == flows_.end() || flow->second.is_over) return;
  flow->second.held.push_back({message, std::move(attached)});
  send_what_fits(process);
}

void SharedConnections::send_what_fits(int process) {
  Flow& flow = flows_.at(process);
  while (!flow.held.empty() && flow.sent - flow.read < kMostUnread) {
    ++flow.sent;
    transmit(process, std::move(flow.held.front()));
    flow.held.pop_front();
  }
}

// Sends a message, or queues it if the socket is full because its process has not read for long. Drops it if the
// process is gone.
void SharedConnections::transmit(int process, Outgoing outgoing) {
  std::deque<Packet>& backlog = flows_.at(process).backlog;
  const bool was_empty = backlog.empty();
  Packet packet;
  std::memcpy(packet.bytes.data(), &outgoing.message, sizeof(outgoing.message));
  packet.attached = std::move(outgoing.attached);
  const auto seals = seals_.find(process);
  if (seals != seals_.end()) seals->second.seal(std::span(packet.bytes).first(wire_bytes(process)));
  backlog.push_back(std::move(packet));
  if (!was_empty) return;
  flush(process);
  if (!backlog.empty()) wake_thread();
}

void SharedConnections::flush(int process) {
  std::deque<Packet>& backlog = flows_.at(process).backlog;
  const Descriptor& socket = controls_.at(process).socket;
  if (!socket.is_open()) backlog.clear();
  while (!backlog.empty()) {
    // Sends message by message, so that a Unix socket never takes a part of one.
    Packet& packet = backlog.front();
    const auto rest = std::span(packet.bytes).first(wire_bytes(process)).subspan(packet.sent);
    const ssize_t sent = send_with(socket.get(), rest, packet.attached);
    if (sent > 0) {
      packet.sent += static_cast<size_t>(sent);
      if (static_cast<size_t>(sent) == rest.size()) backlog.pop_front();
    } else {
      if (!may_succeed_later(errno)) backlog.clear();
      if (errno != EINTR) return;
    }
  }
}

void SharedConnections::handle_read_count(int process, uint64_t count) {
  std::lock_guard lock(sending_);
  Flow& flow = flows_.at(process);
  if (count < flow.read || count > flow.sent) throw ProtocolError(process, "an impossible number of messages read");
  flow.read = count;
  send_what_fits(process);
}

void SharedConnections::report_read(Inbox& inbox) {
  if (++inbox.read % kReadAtOnce != 0) return;
  WatchMessage message;
  message.type = WatchMessage::Type::kRead;
  message.calls_made = inbox.read;
  std::lock_guard lock(sending_);
  transmit(inbox.process, {message});
}

// --- The thread ------------------------------------------------------------------------------------------------------

void SharedConnections::run(Ending& ending) {
  std::vector<Inbox> inboxes;
  std::vector<pollfd> fds = {{wake_.get(), POLLIN, 0}};  // then one for each inbox
  take_added(inboxes, fds);
  while (true) {
    const int limit_ms = poll_limit_ms();
    if (!ending.begin_poll()) return;
    const int error = poll(fds.data(), fds.size(), limit_ms) < 0 ? errno : 0;
    if (!ending.end_poll()) return;
    if (error == EINTR) continue;
    if (error != 0) return report_poll_error(error);
    if (fds[0].revents != 0 && !wake_.is_open()) return report_poll_error(EBADF);
    ring_alarm();
    if (fds[0].revents != 0) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof(count));
    }
    for (size_t i = 0; i < inboxes.size(); ++i) {
      pollfd& polled = fds[i + 1];
      // poll() skips a negative descriptor: nothing more comes from that process.
      if ((polled.revents & ~POLLOUT) != 0 && !receive_from(polled.fd, inboxes[i])) polled.fd = -1;
    }
    take_added(inboxes, fds);
    std::lock_guard lock(sending_);
    for (size_t i = 0; i < inboxes.size(); ++i) {
      const int process = inboxes[i].process;
      Flow& flow = flows_.at(process);
      if (!flow.backlog.empty()) flush(process);
      fds[i + 1].events = static_cast<short>(flow.backlog.empty() ? POLLIN : POLLIN | POLLOUT);
    }
  }
}

void SharedConnections::take_added(std::vector<Inbox>& inboxes, std::vector<pollfd>& fds) {
  std::lock_guard lock(sending_);
  for (const int process : std::exchange(added_, {})) {
    const Descriptor& socket = controls_.at(process).socket;
    const auto seals = seals_.find(process);
    inboxes.push_back({process, socket, seals == seals_.end() ? nullptr : &seals->second});
    fds.push_back({socket.get(), POLLIN, 0});
  }
}

// Receives from a process. Returns false when nothing more will come from it.
bool SharedConnections::receive_from(int fd, Inbox& inbox) {
  const int process = inbox.process;
  if (!inbox.socket.is_open()) {
    report_end(process, end_by(EBADF));
    return false;
  }
  const std::span wire(inbox.bytes.data(), sizeof(WatchMessage) + (inbox.seals != nullptr ? kTagBytes : 0));
  const ssize_t got = receive_with(fd, wire.subspan(inbox.filled), inbox.attached);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (got <= 0) {  // drops an incomplete message, whose sender died while sending it
    report_end(process, end_by(got < 0 ? errno : 0));
    return false;
  }
  inbox.filled += static_cast<size_t>(got);
  if (inbox.filled < wire.size()) return true;
  inbox.filled = 0;
  if (inbox.seals != nullptr && !inbox.seals->open(wire)) {
    report_end(process, {std::string(" was lost: ") + kAltered, true});
    return false;
  }
  try {
    handle_message(wire.first(sizeof(WatchMessage)), inbox);
    return true;
  } catch (const ProtocolError& error) {
    report_end(process, {distrust_of(error), true});
    return false;
  }
}

void SharedConnections::handle_message(std::span<const std::byte> bytes, Inbox& inbox) {
  const int process = inbox.process;
  const WatchMessage::Header header = WatchMessage::header(bytes, process);
  Descriptor attached = std::exchange(inbox.attached, {});
  if (header.type == WatchMessage::Type::kRead) return handle_read_count(process, header.calls_made);
  report_read(inbox);
  std::lock_guard lock(joining_);
  const auto member = members_.find(header.communicator);
  if (member != members_.end()) member->second->on_message(process, bytes, std::move(attached));
}

void SharedConnections::report_end(int process, const End& end) {
  if (!end.is_violation) {  // otherwise later messages to a process that has gone would be held for ever
    std::lock_guard lock(sending_);
    Flow& flow = flows_.at(process);
    flow.is_over = true;
    flow.held.clear();
  }
  std::lock_guard lock(joining_);
  ends_[process] = end;
  for (const auto& [communicator, member] : members_) member->on_end(process, end);
}

// From here on this process cannot detect lost processes, so all its communicators fail.
void SharedConnections::report_poll_error(int error) {
  std::lock_guard lock(joining_);
  for (const auto& [communicator, member] : members_) member->on_poll_error(error);
}

void SharedConnections::set_alarm(int64_t at_ns) { alarm_ns_ = alarm_ns_ == 0 ? at_ns : std::min(alarm_ns_, at_ns); }

int SharedConnections::poll_limit_ms() const {
  if (alarm_ns_ == 0) return -1;
  return static_cast<int>(std::max<int64_t>((alarm_ns_ - steady_now_ns()) / 1'000'000 + 1, 0));
}

void SharedConnections::ring_alarm() {
  if (alarm_ns_ == 0 || steady_now_ns() < alarm_ns_) return;
  alarm_ns_ = 0;
  std::lock_guard lock(joining_);
  for (const auto& [communicator, member] : members_) member->on_alarm();
}

}  // namespace ronde
