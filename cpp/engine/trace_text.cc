#include "engine/trace_text.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <iterator>

#include "base/types.h"

namespace ronde {
namespace {

constexpr size_t kLongestName = 500;  // bytes; escaping makes a name up to six times as long

// Names by phase. Those in capitals are Horovod's, for programs that read its timelines. The kind of the operation
// follows NEGOTIATE_, and is the whole name of an operation.
constexpr std::string_view kNames[] = {
    "", "NEGOTIATE_", "queue", "MEMCPY_IN_FUSION_BUFFER", "", "MEMCPY_OUT_FUSION_BUFFER", "negotiation round"};
constexpr std::string_view kKinds[] = {"BARRIER", "ALLREDUCE", "REDUCE",   "REDUCESCATTER", "ALLGATHER", "BROADCAST",
                                       "GATHER",  "SCATTER",   "ALLTOALL", "SENDRECV",      "EMPTY"};

// Appends to the text of one record, in memory that is large enough for any record.
class RecordText {
 public:
  explicit RecordText(char* to) : begin_(to), to_(to) {}
  // A literal: its length is known, so the copy takes a few instructions.
  template <size_t kSize>
  RecordText& put(const char (&text)[kSize]) {
    std::memcpy(to_, text, kSize - 1);
    to_ += kSize - 1;
    return *this;
  }
  RecordText& put(std::string_view text) {
    std::memcpy(to_, text.data(), text.size());
    to_ += text.size();
    return *this;
  }
  RecordText& put(char letter) {
    *to_++ = letter;
    return *this;
  }
  RecordText& put(uint64_t number) {
    to_ = std::to_chars(to_, to_ + 20, number).ptr;
    return *this;
  }
  RecordText& put(int64_t number) {
    to_ = std::to_chars(to_, to_ + 20, number).ptr;
    return *this;
  }
  // In microseconds, the unit of traces.
  RecordText& put_time(int64_t ns) {
    const auto whole = static_cast<uint64_t>(std::max<int64_t>(ns, 0));
    put(whole / 1000);
    const uint64_t rest = whole % 1000;
    const char digits[] = {'.', char('0' + rest / 100), char('0' + rest / 10 % 10), char('0' + rest % 10), 0};
    return put(digits);
  }
  // A JSON string in UTF-8, shortened to kLongestName.
  RecordText& put_name(std::string_view name) {
    size_t length = std::min(name.size(), kLongestName);
    while (length < name.size() && length > 0 && (name[length] & 0xc0) == 0x80) --length;
    put("\"");
    for (const char each : name.substr(0, length)) put_letter(each);
    return put(length < name.size() ? "...\"" : "\"");
  }
  std::string_view text() const { return {begin_, static_cast<size_t>(to_ - begin_)}; }

 private:
  void put_letter(char letter) {
    if (letter == '"' || letter == '\\') {
      put("\\").put(letter);
    } else if (static_cast<unsigned char>(letter) < 0x20) {
      const char* const hex = "0123456789abcdef";
      put("\\u00").put(hex[letter / 16]).put(hex[letter % 16]);
    } else {
      put(letter);
    }
  }
  char* begin_;
  char* to_;
};

}  // namespace

TraceText::TraceText(Identity identity, TraceFile& file)
    : identity_(std::move(identity)), file_(file), record_(TraceFile::kLongest, ' ') {
  describe_itself();
}

// Records the rank, the size and the clocks at the beginning, by which a reader merges the files of several ranks.
void TraceText::describe_itself() {
  const auto rank = static_cast<int64_t>(identity_.rank);
  const std::string name = "rank " + std::to_string(rank) + " on " + identity_.host;
  RecordText process(record_.data());
  process.put(R"({"ph":"M","pid":)").put(rank).put(R"(,"name":"process_name","args":{"name":)").put_name(name);
  file_.add(process.put("}}").text());
  RecordText order(record_.data());
  order.put(R"({"ph":"M","pid":)").put(rank).put(R"(,"name":"process_sort_index","args":{"sort_index":)").put(rank);
  file_.add(order.put("}}").text());
  RecordText timeline(record_.data());
  timeline.put(R"({"ph":"M","pid":)").put(rank).put(R"(,"name":"ronde_timeline","args":{"version":1,"rank":)");
  timeline.put(rank).put(R"(,"size":)").put(int64_t{identity_.size}).put(R"(,"host":)").put_name(identity_.host);
  timeline.put(R"(,"steady_ns":)").put(identity_.begin_ns).put(R"(,"wall_ns":)").put(identity_.wall_ns);
  file_.add(timeline.put("}}").text());
}

void TraceText::add_track(std::string_view name) {
  const auto rank = static_cast<int64_t>(identity_.rank);
  const auto thread = static_cast<uint64_t>(tracks_.size() + 1);  // some viewers reserve 0
  RecordText head(record_.data());
  head.put(R"("pid":)").put(rank).put(R"(,"tid":)").put(thread).put(R"(,"ts":)");
  tracks_.emplace_back().head = head.text();
  RecordText record(record_.data());
  record.put(R"({"ph":"M","pid":)").put(rank).put(R"(,"tid":)").put(thread);
  record.put(R"(,"name":"thread_name","args":{"name":)").put_name(name).put("}}");
  file_.add(record.text());
}

void TraceText::add_event(const Event& event) {
  using What = Event::What;
  if (event.what == What::kClock) {
    RecordText record(record_.data());
    record.put(R"({"ph":"M","pid":)").put(int64_t{identity_.rank}).put(R"(,"name":"ronde_clock","args":{"steady_ns":)");
    record.put(event.ns).put(R"(,"offset_ns":)").put(static_cast<int64_t>(event.value));
    file_.add(record.put(R"(,"error_ns":)").put(uint64_t{event.track}).put("}}").text());
    return;
  }
  if (event.track >= tracks_.size()) return;
  Track& track = tracks_[event.track];
  switch (event.what) {
    case What::kSubmitted:
      begin_phase(track, Phase::kNegotiate, event.ns);
      track.kind = event.detail;
      return;
    case What::kTick:  // a rank without data has not submitted it, and its stamp is older
      if (event.ns >= track.decided_ns) tick_rank(track, event.value, event.ns);
      return;
    case What::kDecided:
      track.decision = event.value;
      track.decided_ns = event.ns;
      if (track.phase == Phase::kNegotiate) tick_rank(track, static_cast<uint64_t>(identity_.rank), track.since_ns);
      end_phase(track, event.ns);
      return begin_phase(track, Phase::kQueue, event.ns);
    case What::kRefused:
      end_phase(track, event.ns, false);
      return tick(track, "refused", event.ns);
    case What::kStarted:
      track.members.clear();
      track.group = ++groups_;
      track.kind = event.detail;
      track.bytes = 0;
      track.tensors = event.value;
      return begin_phase(track, event.value > 1 ? Phase::kFuse : Phase::kOperation, event.ns);
    case What::kMember:
      if (event.value < tracks_.size()) join_operation(tracks_[event.value], event);
      return;
    case What::kFused:
      return begin_members_phase(track, Phase::kOperation, event.ns);
    case What::kRan:
      return begin_members_phase(track, Phase::kUnfuse, event.ns);
    case What::kEnded:
      begin_members_phase(track, Phase::kNone, event.ns);
      return track.members.clear();
    case What::kCycle:
      return tick(track, "CYCLE_START", event.ns);
    case What::kRoundBegan:
      track.decision = event.value;
      return begin_phase(track, Phase::kRound, event.ns);
    case What::kRoundEnded:
      return end_phase(track, event.ns);
    case What::kClock:
      return;
  }
}

// Adds a tensor to those that the engine has begun to run.
void TraceText::join_operation(Track& engine, const Event& event) {
  if (engine.phase == Phase::kNone) return;
  Track& track = tracks_[event.track];
  engine.bytes += static_cast<uint64_t>(event.ns);
  if (track.group == engine.group) {  // the tensors of a group share a name
    track.bytes += static_cast<uint64_t>(event.ns);
    return;
  }
  engine.members.push_back(event.track);
  track.group = engine.group;
  track.kind = engine.kind;
  track.bytes = static_cast<uint64_t>(event.ns);
  track.tensors = engine.tensors;
  end_phase(track, engine.since_ns);
  begin_phase(track, engine.phase, engine.since_ns);
}

void TraceText::begin_members_phase(Track& engine, Phase next, int64_t ns) {
  if (engine.phase == Phase::kNone) return;  // began before the timeline
  for (const uint32_t member : engine.members) {
    end_phase(tracks_[member], ns);
    begin_phase(tracks_[member], next, ns);
  }
  end_phase(engine, ns);
  begin_phase(engine, next, ns);
}

void TraceText::begin_phase(Track& track, Phase phase, int64_t ns) {
  if (track.is_open) add_record('E', track, ns);  // the event of its end was dropped
  track.phase = phase;
  track.since_ns = ns;
  track.is_open = false;
}

void TraceText::end_phase(Track& track, int64_t ns, bool is_decided) {
  if (track.phase == Phase::kNone) return;
  if (!is_decided) track.decision = UINT64_MAX;
  add_record(track.is_open ? 'E' : 'X', track, ns);
  track.is_open = false;
  track.phase = Phase::kNone;
}

// Adds the record of a phase: X when it ends (at `ns`), or B while it lasts and later E when it ends.
void TraceText::add_record(char type, const Track& track, int64_t ns) {
  const Phase phase = track.phase;
  RecordText record(record_.data());
  record.put(R"({"ph":")").put(type).put(R"(",)").put(track.head);
  record.put_time((type == 'E' ? ns : track.since_ns) - identity_.begin_ns);
  if (type == 'X') record.put(R"(,"dur":)").put_time(ns - track.since_ns);
  record.put(R"(,"name":")").put(kNames[static_cast<size_t>(phase)]);
  if (phase == Phase::kNegotiate || phase == Phase::kOperation) {
    record.put(track.kind < std::size(kKinds) ? kKinds[track.kind] : "UNKNOWN");
  }
  if (phase == Phase::kOperation) {
    record.put(R"(","args":{"kind":")").put(name_of(static_cast<Kind>(track.kind))).put(R"(","bytes":)");
    record.put(track.bytes).put(R"(,"tensors":)").put(track.tensors).put("}}");
  } else if (type != 'B' && (phase == Phase::kNegotiate || phase == Phase::kRound) && track.decision != UINT64_MAX) {
    record.put(R"(","args":{"decision":)").put(track.decision).put("}}");
  } else {
    record.put("\"}");
  }
  file_.add(record.text());
}

void TraceText::tick_rank(const Track& track, uint64_t rank, int64_t ns) {
  char name[32] = "rank ";
  const char* const end = std::to_chars(name + 5, name + sizeof(name), rank).ptr;
  tick(track, std::string_view(name, static_cast<size_t>(end - name)), ns);
}

void TraceText::tick(const Track& track, std::string_view name, int64_t ns) {
  if (ns < identity_.begin_ns) return;
  RecordText record(record_.data());
  record.put(R"({"ph":"i",)").put(track.head).put_time(ns - identity_.begin_ns);
  file_.add(record.put(R"(,"name":")").put(name).put("\"}").text());
}

void TraceText::add_dropped(uint64_t count, int64_t ns) {
  if (!tracks_.empty()) tick(tracks_.front(), std::to_string(count) + " events lost", ns);
}

bool TraceText::open_long_phases(int64_t before_ns) {
  bool is_all = true;
  for (Track& track : tracks_) {
    if (track.phase == Phase::kNone || track.is_open) continue;
    if (track.since_ns < before_ns) {
      add_record('B', track, 0);
      track.is_open = true;
    } else {
      is_all = false;
    }
  }
  return is_all;
}

}  // namespace ronde
