// Turns events into the records of a trace (Chrome's trace event format, which Perfetto reads).
//
// Every tensor has a track (a "thread" of the process that stands for the rank) with its phases: negotiate, queue,
// fuse, operation, unfuse. An engine has one track for the operations it runs, and one for its negotiation rounds. A
// phase becomes one record when it ends. A long phase becomes two, at its beginning and at its end, so that the file of
// a process that hangs or has died shows it. docs/timeline.md describes the records.
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
  struct Identity {
    int rank = 0;
    int size = 1;
    std::string host;
    int64_t begin_ns = 0;  // the origin of the records' times
    int64_t wall_ns = 0;   // the same moment, since 1970
  };
  TraceText(Identity identity, TraceFile& file);

  // Adds a track for later events. Tracks are numbered from 0.
  void add_track(std::string_view name);
  size_t tracks() const { return tracks_.size(); }
  void add_event(const Event& event);
  void add_dropped(uint64_t count, int64_t ns);

  // Opens the phases that began before `before_ns`. Returns false if a younger phase is still running.
  bool open_long_phases(int64_t before_ns);

 private:
  enum class Phase : uint8_t { kNone, kNegotiate, kQueue, kFuse, kOperation, kUnfuse, kRound };
  struct Track {
    std::string head;  // the common part of its records
    Phase phase = Phase::kNone;
    bool is_open = false;
    uint8_t kind = 0;  // of the operation
    int64_t since_ns = 0;
    int64_t decided_ns = 0;
    uint64_t decision = 0;
    uint64_t group = 0;  // the number of the last operation that it was part of
    uint64_t bytes = 0;
    uint64_t tensors = 1;           // in that operation
    std::vector<uint32_t> members;  // for an engine: the tracks of the tensors that it runs
  };

  void describe_itself();
  void join_operation(Track& engine, const Event& event);
  void begin_phase(Track& track, Phase phase, int64_t ns);
  void end_phase(Track& track, int64_t ns, bool is_decided = true);
  void begin_members_phase(Track& engine, Phase next, int64_t ns);
  void tick(const Track& track, std::string_view name, int64_t ns);
  void tick_rank(const Track& track, uint64_t rank, int64_t ns);
  void add_record(char type, const Track& track, int64_t ns);

  Identity identity_;
  TraceFile& file_;
  std::vector<Track> tracks_;
  uint64_t groups_ = 0;
  std::string record_;
};

}  // namespace ronde
