// What one engine tells the timeline: a line at each place of its cycle and runner where something begins or ends.
//
// Every rank stamps the board with the time of each of its submissions as long as any rank of the host has its timeline
// on. So whoever writes one knows when each rank of its host has submitted: they have the same steady clock.
//
// submitted() by any thread, one at a time; the others by whoever does the engine's steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "communicator.h"
#include "engine/board.h"
#include "engine/clock_offset.h"
#include "engine/timeline.h"
#include "function_ref.h"
#include "steady_clock.h"
#include "types.h"

namespace ronde {

struct Work;

class Recorder {
 public:
  // In place of a slot's number: of what runs in a cold round the first, the second and so on, from here up.
  static constexpr uint32_t kColdSlots = uint32_t{1} << 31;

  Recorder(Communicator& communicator, const Board& board, size_t capacity);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Before anything else. `label`: goes before the names of tensors and of the engine, to tell engines apart; that of
  // all ranks has none, and measures the clock. `world_ranks`: by rank of this engine's communicator.
  void record_into(std::shared_ptr<Timeline> timeline, std::string label, const std::vector<int>& world_ranks);

  // This rank submits a tensor, by its slot (before it flips its bit) or without one; for the board of a host where
  // some timeline is on.
  void submitted(uint32_t slot, std::string_view name, Kind kind);
  void submitted_cold(std::string_view name, Kind kind) {
    if (is_on()) push_submitted(steady_now_ns(), track_of(name), kind);
  }
  // What all have submitted runs next. `place`: of the decision in the log.
  template <class NameOf>
  void decided(std::span<const uint32_t> slots, NameOf&& name_of, uint64_t place) {
    if (is_on()) [[unlikely]]
      record_decision(slots, name_of, place);
  }
  void decided_cold(std::string_view name);
  void ran_cold() { cold_tracks_.clear(); }
  void refused(std::string_view name) {
    if (is_on()) push(Event::What::kRefused, track_of(name));
  }
  // Another tensor gets the slot.
  void forget(uint32_t slot) { tracks_[slot].store(kNoTrack, std::memory_order_relaxed); }

  // Tensors that run as one; what is not fused has only a beginning and an end.
  void began(std::span<const Work* const> group) {
    if (is_on()) [[unlikely]]
      begin_group(group);
  }
  void fused() { engine_event(Event::What::kFused); }
  void ran() { engine_event(Event::What::kRan); }
  void ended() { engine_event(Event::What::kEnded); }

  void round_began(uint64_t place) {
    if (is_on()) begin_round(place);
  }
  void round_ended() {
    if (is_on()) push(Event::What::kRoundEnded, rounds_track_);
  }

  // From another rank: true if it was about clocks.
  bool on_note(int peer, std::span<const uint32_t> words) { return clock_.on_note(peer, words); }
  // For the timeline.
  void switched(bool on);
  void measure_clock() {
    if (label_.empty()) clock_.measure();
  }

 private:
  static constexpr uint32_t kNoTrack = UINT32_MAX;

  bool is_on() const { return timeline_ != nullptr && timeline_->is_on(); }
  void push(Event::What what, uint32_t track, uint64_t value = 0) const {
    timeline_->push({steady_now_ns(), value, track, what, 0});
  }
  void push_submitted(int64_t now_ns, uint32_t track, Kind kind) const {
    timeline_->push({now_ns, 0, track, Event::What::kSubmitted, static_cast<uint8_t>(kind)});
  }
  void engine_event(Event::What what) {
    if (is_on()) [[unlikely]]
      push(what, engine_track_);
  }
  uint32_t track_of(std::string_view name) const;
  uint32_t track_of(uint32_t slot, std::string_view name);
  void begin_group(std::span<const Work* const> group);
  void begin_round(uint64_t place);
  void record_decision(std::span<const uint32_t> slots, FunctionRef<std::string_view(uint32_t)> name_of,
                       uint64_t place);

  const Board& board_;
  std::vector<int> ranks_;  // of this host, by local rank; of the world from record_into() on
  int local_rank_;
  std::shared_ptr<Timeline> timeline_;
  std::string label_;
  uint32_t engine_track_ = 0, rounds_track_ = 0;
  std::vector<std::atomic<uint32_t>> tracks_;  // by slot
  uint64_t round_ = 0;                         // the place in the log of the cold round
  std::vector<uint32_t> cold_tracks_;          // what it has decided, and not run yet
  ClockOffset clock_;
};

}  // namespace ronde
