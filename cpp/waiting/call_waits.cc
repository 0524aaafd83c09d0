#include "waiting/call_waits.h"

namespace ronde {
namespace {

// The parts of an id: the type of call, the ranks that send and receive, and the number.
struct CallId {
  enum class Type : uint64_t { kCollective = 0, kSend = 1, kRecv = 2 };  // the waiting rank's
  static constexpr int kRankBits = 14, kNumberBits = 34;
  static constexpr uint64_t kRanks = (uint64_t{1} << kRankBits) - 1, kNumbers = (uint64_t{1} << kNumberBits) - 1;

  Type type;
  uint64_t from, to, number;

  uint64_t packed() const {
    return static_cast<uint64_t>(type) << 62 | (from & kRanks) << (kNumberBits + kRankBits) |
           (to & kRanks) << kNumberBits | (number & kNumbers);
  }
  static CallId of(uint64_t packed) {
    return {static_cast<Type>(packed >> 62), packed >> (kNumberBits + kRankBits) & kRanks,
            packed >> kNumberBits & kRanks, packed & kNumbers};
  }
  static CallId of(const Watch::LongCall& call, int rank) {
    const auto own = static_cast<uint64_t>(rank), peer = static_cast<uint64_t>(call.direction.peer);
    if (call.call.kind != Kind::kSendRecv) return {Type::kCollective, 0, 0, call.call.sequence};
    if (call.direction.sends) return {Type::kSend, own, peer, call.number};
    return {Type::kRecv, peer, own, call.number};
  }
};

}  // namespace

void CallWaits::visit(const std::function<void(const Item&)>& visit) {
  const auto call = communicator_.watch().long_call();
  if (!call) return;
  Item item{.id = CallId::of(*call, communicator_.rank()).packed(),
            .name = call->call.describe(),
            .kind = "call " + std::to_string(call->call.sequence + 1),
            .since_ns = call->since_ns,
            .is_awaited = true};
  if (call->call.kind == Kind::kSendRecv) {
    item.kind = (call->direction.sends ? "send to rank " : "recv from rank ") + std::to_string(call->direction.peer);
    item.name = std::string(name_of(call->call.dtype)) + " with tag " + std::to_string(call->call.root);
  }
  if (!call->posted_at.empty()) item.name += ", posted at " + call->posted_at;
  visit(item);
}

std::vector<bool> CallWaits::have_begun(std::span<const uint64_t> ids) {
  std::vector<bool> has;
  for (const uint64_t id : ids) has.push_back(has_begun(id));
  return has;
}

bool CallWaits::has_begun(uint64_t packed) {
  const CallId id = CallId::of(packed);
  Watch& watch = communicator_.watch();
  if (id.type == CallId::Type::kCollective) return (watch.calls_begun() & CallId::kNumbers) > id.number;
  const bool we_send = id.type == CallId::Type::kRecv;
  const auto own = static_cast<uint64_t>(communicator_.rank());
  if ((we_send ? id.from : id.to) != own) return true;  // waits for another rank
  const int peer = static_cast<int>(we_send ? id.to : id.from);
  if (peer >= communicator_.size()) return true;
  const Watch::Direction direction{peer, we_send};
  if ((watch.messages(direction) & CallId::kNumbers) > id.number) return true;
  const auto ours = watch.long_call();  // this rank may be inside its part
  return ours && ours->call.kind == Kind::kSendRecv && ours->direction.peer == peer && ours->direction.sends == we_send;
}

std::string CallWaits::state() {
  const uint64_t calls = communicator_.watch().calls_begun();
  const auto ours = communicator_.watch().long_call();
  if (ours && ours->call.kind != Kind::kSendRecv) return "is in its collective call " + std::to_string(calls);
  return "has made " + std::to_string(calls) + (calls == 1 ? " collective call" : " collective calls");
}

std::string CallWaits::describe(const Item& item) { return "in " + item.kind + " on " + label_ + ": " + item.name; }

}  // namespace ronde
