// The timeline of a rank: when each named tensor was submitted, decided, fused, reduced. docs/timeline.md shows one.
//
//   engine's threads --events--> ring --> the writer, a separate thread --records--> the file
//
// While the timeline is off, the hot path reads one flag. While it is on, an event is a store into a ring
// (event_ring.h); the writer drains the ring every 0.1 s, or earlier if the ring fills. Without events the writer
// sleeps without a time limit. The file is valid at any moment (trace_file.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine/event_ring.h"
#include "engine/trace_text.h"

namespace ronde {

class Recorder;

class Timeline {
 public:
  Timeline() = default;
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  struct Options {
    std::string path;
    int rank = 0;
    int size = 1;
    std::string host;
    bool marks_cycles = false;          // a tick for each decision
    size_t capacity = size_t{1} << 16;  // events in the ring, a power of two; the first start decides
  };
  // Begins a file. Throws UsageError if the timeline is on, std::system_error if the file cannot be created.
  void start(const Options& options);
  // Ends the file. Returns the error that occurred meanwhile, or an empty text. Does nothing if the timeline is off.
  std::string stop();
  // In a forked child, which has no writer and whose file is the parent's. Takes no lock.
  void abandon();

  bool is_on() const { return is_on_.load(std::memory_order_acquire); }
  bool marks_cycles() const { return marks_cycles_.load(std::memory_order_relaxed); }

  // For recorders, while the timeline is on. track() returns the number of the track with that name.
  void push(const Event& event);
  uint32_t track(std::string_view name);

  // Adds and removes an engine's recorder. The timeline calls its switched() when it goes on and off.
  void attach(Recorder& recorder);
  void detach(Recorder& recorder);

 private:
  static constexpr size_t kMostTracks = 1 << 16;  // bounds the memory if the program keeps using new names
  static constexpr uint32_t kAwake = 0, kNapping = 1, kSleeping = 2;

  void write();
  bool drain(TraceText& text, TraceFile& file);
  void write_event(TraceText& text, const Event& event);
  void sleep(uint32_t how, int64_t limit_ns);
  void wake();

  std::atomic<bool> is_on_{false};
  std::atomic<bool> marks_cycles_{false};
  std::atomic<bool> is_abandoned_{false};
  std::unique_ptr<EventRing> ring_;                  // exists from the first start on
  alignas(64) std::atomic<uint32_t> sleep_{kAwake};  // the writer's state, and its futex
  std::atomic<bool> stopping_{false};

  std::mutex switching_;  // one start or stop at a time
  std::unique_ptr<TraceFile> file_;
  std::unique_ptr<TraceText> text_;
  std::unique_ptr<std::thread> writer_;
  uint64_t dropped_before_ = 0;

  std::mutex attaching_;
  std::vector<Recorder*> recorders_;

  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  std::mutex naming_;
  std::vector<std::string> names_;  // by track
  std::unordered_map<std::string, uint32_t, Hash, std::equal_to<>> track_of_;
};

}  // namespace ronde
