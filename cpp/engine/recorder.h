// Records the events of one engine for the timeline: one call at each place of its cycle and runner where a phase
// begins or ends.
//
// While any rank of the host has its timeline on, every rank stamps the board with the time of each of its submissions.
// So the writer of a timeline knows when each rank of its host submitted: the ranks share a steady clock.
//
// Any thread calls submitted(), one at a time. The thread that does the engine's steps calls the other functions.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/function_ref.h"
#include "base/steady_clock.h"
#include "base/types.h"
#include "communicator/communicator.h"
#include "engine/board.h"
#include "engine/clock_offset.h"
#include "engine/timeline.h"

namespace ronde {

struct Work;

class Recorder {
 public:
  // Replaces a slot's number in a negotiation round: the first tensor that runs there has kMissSlots, the next one
  // more.
  static constexpr uint32_t kMissSlots = uint32_t{1} << 31;

  Recorder(Communicator& communicator, const Board& board, size_t capacity);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Call it first. `label` precedes the names of tensors and of the engine, to tell engines apart. It is empty for the
  // engine of all ranks, which also measures the clock. `world_ranks`: by rank of this engine's communicator.
  void record_into(std::shared_ptr<Timeline> timeline, std::string label, const std::vector<int>& world_ranks);

  // This rank submits a tensor, by its slot (call it before flipping the bit) or without one. Only if a timeline of
  // this host is on (Board::is_timed()).
  void submitted(uint32_t slot, std::string_view name, Kind kind);
  void submitted_miss(std::string_view name, Kind kind) {
    if (is_on()) push_submitted(steady_now_ns(), track_of(name), kind);
  }
  // The slots of one decision run next. `place`: the decision's place in the log.
  template <class NameOf>
  void decided(std::span<const uint32_t> slots, NameOf&& name_of, uint64_t place) {
    if (is_on()) [[unlikely]]
      record_decision(slots, name_of, place);
  }
  void decided_miss(std::string_view name);
  void ran_misses() { miss_tracks_.clear(); }
  void refused(std::string_view name) {
    if (is_on()) push(Event::What::kRefused, track_of(name));
  }
  // Call it when another tensor gets the slot.
  void forget_slot(uint32_t slot) { tracks_[slot].store(kNoTrack, std::memory_order_relaxed); }

  // The phases of tensors that run as one. Without fusion there are only began() and ended().
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

  // Handles a note of another rank. Returns false if it is not about clocks.
  bool on_note(int peer, std::span<const uint32_t> words) { return clock_.on_note(peer, words); }
  // The timeline calls these.
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
  std::vector<int> ranks_;  // this host's, by local rank; world ranks after record_into()
  int local_rank_;
  std::shared_ptr<Timeline> timeline_;
  std::string label_;
  uint32_t engine_track_ = 0, rounds_track_ = 0;
  std::vector<std::atomic<uint32_t>> tracks_;  // by slot
  uint64_t round_ = 0;                         // the negotiation round's place in the log
  std::vector<uint32_t> miss_tracks_;          // tensors that the negotiation round has decided and not run yet
  ClockOffset clock_;
};

}  // namespace ronde
