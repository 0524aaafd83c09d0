// Turns events into the records of a trace (Chrome's trace event format, which Perfetto reads).
//
// Every tensor has a track (a "thread" of the process that is the rank), on which its phases follow each other:
// negotiate, queue, fuse, operation, unfuse. An engine has one for whatever it runs, and one for its cold rounds. A
// phase becomes a record when it is over; one that lasts is opened before that and closed later, so that it can be seen
// in the file of a process that hangs or has died. docs/timeline.md describes the records.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/event_ring.h"
#include "engine/trace_file.h"

namespace ronde {

class TraceText {
 public:
  struct Who {
    int rank = 0;
    int size = 1;
    std::string host;
    int64_t begin_ns = 0;  // times are counted from here
    int64_t wall_ns = 0;   // the same moment since 1970
  };
  TraceText(Who who, TraceFile& file);

  // The next track that events are going to speak of; tracks are numbered from 0 on.
  void add_track(std::string_view name);
  size_t tracks() const { return tracks_.size(); }
  void take(const Event& event);
  void tell_dropped(uint64_t count, int64_t ns);

  // Opens what has been going on since before that moment. False if something that goes on is younger.
  bool open_what_lasts(int64_t before_ns);

 private:
  enum class Phase : uint8_t { kNone, kNegotiate, kQueue, kFuse, kOperation, kUnfuse, kRound };
  struct Track {
    std::string head;  // what all its records have in common
    Phase phase = Phase::kNone;
    bool is_open = false;
    uint8_t kind = 0;  // of the operation
    int64_t since_ns = 0;
    int64_t decided_ns = 0;
    uint64_t decision = 0;
    uint64_t group = 0;  // of what runs as one, the last that it was in
    uint64_t bytes = 0;
    uint64_t tensors = 1;           // run as one operation
    std::vector<uint32_t> members;  // of an engine: the tracks of what it runs
  };

  void describe_itself();
  void join(Track& engine, const Event& event);
  void begin(Track& track, Phase phase, int64_t ns);
  void end(Track& track, int64_t ns, bool is_decided = true);
  void pass_on(Track& engine, Phase next, int64_t ns);
  void tick(const Track& track, std::string_view name, int64_t ns);
  void tick_rank(const Track& track, uint64_t rank, int64_t ns);
  void add(char type, const Track& track, int64_t ns);

  Who who_;
  TraceFile& file_;
  std::vector<Track> tracks_;
  uint64_t groups_ = 0;
  std::string record_;
};

}  // namespace ronde
