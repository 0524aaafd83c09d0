#include "failures/watch_message.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace ronde {
namespace {

bool is_between(int32_t number, int32_t least, int32_t most) { return number >= least && number <= most; }

// The defect of a message of one type; nullptr: none.
const char* find_fault_of_failure(const WatchMessage& message, int size) {
  if (!is_between(message.failure_kind, static_cast<int>(FailureKind::kPeerLost),
                  static_cast<int>(FailureKind::kTimeout))) {
    return "a failure of an unknown kind";
  }
  if (!is_between(message.rank, -1, size - 1)) return "a failure of a rank that does not exist";
  if (!is_between(message.missing_count, 0, WatchMessage::kMissing)) return "a failure with too many missing ranks";
  const std::vector<int> missing = message.missing_ranks();
  if (!std::all_of(missing.begin(), missing.end(), [size](int rank) { return is_between(rank, 0, size - 1); })) {
    return "a failure with a missing rank that does not exist";
  }
  if (std::memchr(message.reason, 0, sizeof(message.reason)) == nullptr) return "a failure whose reason does not end";
  return nullptr;
}

const char* find_fault_of_call(const WatchMessage& message, int size) {
  if (!is_between(message.rank, -1, size - 1)) return "a long call to a rank that does not exist";
  if (!is_between(message.missing_count, 0, 1)) return "a long call that neither sends nor receives";
  if (!message.call.is_known()) return "a long call of an unknown kind";
  return nullptr;
}

const char* find_fault_of_note(const WatchMessage& message) {
  if (!is_between(message.rank, 0, WatchMessage::kChannels - 1)) return "a note for an unknown channel";
  if (!is_between(message.missing_count, 0, WatchMessage::kNoteWords)) return "a note of too many words";
  return nullptr;
}

const char* find_fault(const WatchMessage& message, int size) {
  switch (message.type) {
    case WatchMessage::Type::kGoodbye:
      return message.calls_made == WatchMessage::kNoCalls ? "a goodbye after an impossible number of calls" : nullptr;
    case WatchMessage::Type::kFailure:
      return find_fault_of_failure(message, size);
    case WatchMessage::Type::kLongCall:
      return find_fault_of_call(message, size);
    case WatchMessage::Type::kRead:
      return nullptr;
    case WatchMessage::Type::kNote:
      return find_fault_of_note(message);
    case WatchMessage::Type::kDescriptor:
      return is_between(message.missing_count, 0, 1) ? nullptr : "several descriptors at once";
  }
  return "a control message of an unknown type";
}

WatchMessage copy_of(std::span<const std::byte> bytes, int peer) {
  WatchMessage message;
  if (bytes.size() != sizeof(message)) {
    throw ProtocolError(peer, "a control message of " + std::to_string(bytes.size()) + " bytes");
  }
  std::memcpy(static_cast<void*>(&message), bytes.data(), sizeof(message));
  if (message.magic != WatchMessage::kMagic) throw ProtocolError(peer, "something that is not a control message");
  return message;
}

// The length in bytes of the character at the beginning of `text`; 0: invalid.
size_t character_bytes(std::string_view text) {
  const auto byte = [&](size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  const size_t bytes = first >= 0xc2 && first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  if (first < 0xc2 || first > 0xf4 || text.size() < bytes) return 0;
  for (size_t at = 1; at < bytes; ++at) {
    if ((byte(at) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, UTF-16 surrogates, values beyond U+10FFFF, and the control characters U+0080 to U+009F.
  const unsigned char second = byte(1);
  const bool is_none = (first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
                       (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f) ||
                       (first == 0xc2 && second < 0xa0);
  return is_none ? 0 : bytes;
}

}  // namespace

std::string printable(std::string_view text, size_t most) {
  std::string clean;
  while (!text.empty()) {
    const bool is_space = text.front() == '\n' || text.front() == '\t';
    const size_t bytes = is_space ? 1 : character_bytes(text);
    if (clean.size() + std::max<size_t>(bytes, 1) > most) break;
    bytes == 0 ? clean.push_back('?') : static_cast<void>(clean.append(text.substr(0, bytes)));
    text.remove_prefix(std::max<size_t>(bytes, 1));
  }
  return clean;
}

WatchMessage::Header WatchMessage::header(std::span<const std::byte> bytes, int process) {
  const WatchMessage message = copy_of(bytes, process);
  return {message.type, message.communicator, message.calls_made};
}

WatchMessage WatchMessage::parse(std::span<const std::byte> bytes, int peer, int size) {
  const WatchMessage message = copy_of(bytes, peer);
  if (const char* const fault = find_fault(message, size)) throw ProtocolError(peer, fault);
  return message;
}

void WatchMessage::set_reason(std::string_view text) {
  const std::string clean = printable(text, sizeof(reason) - 1);
  std::memcpy(reason, clean.data(), clean.size());
  reason[clean.size()] = 0;
}

std::string WatchMessage::reason_text() const {
  return printable(std::string_view(reason, strnlen(reason, sizeof(reason))), sizeof(reason));
}

}  // namespace ronde
