#include "engine/recorder.h"

#include <utility>

#include "base/steady_clock.h"
#include "engine/runner.h"

namespace ronde {

Recorder::Recorder(Communicator& communicator, const Board& board, size_t capacity)
    : board_(board),
      ranks_(communicator.ranks_of_host()[communicator.host_of()[communicator.rank()]]),
      local_rank_(communicator.local_rank()),
      tracks_(capacity),
      clock_(communicator, [this](int64_t ns, int64_t offset_ns, uint32_t error_ns) {
        if (is_on()) timeline_->push({ns, static_cast<uint64_t>(offset_ns), error_ns, Event::What::kClock, 0});
      }) {
  for (auto& track : tracks_) track.store(kNoTrack, std::memory_order_relaxed);
}

Recorder::~Recorder() {
  if (timeline_ != nullptr) timeline_->detach(*this);
}

void Recorder::record_into(std::shared_ptr<Timeline> timeline, std::string label, const std::vector<int>& world_ranks) {
  label_ = std::move(label);
  for (int& rank : ranks_) rank = world_ranks.at(rank);
  engine_track_ = timeline->track(label_ + "engine");
  rounds_track_ = timeline->track(label_ + "engine: negotiation rounds");
  timeline_ = std::move(timeline);
  timeline_->attach(*this);
}

void Recorder::switched(bool on) {
  board_.count_timeline(on ? 1 : -1);
  if (on) measure_clock();
}

uint32_t Recorder::track_of(std::string_view name) const {
  return timeline_->track(label_.empty() ? name : label_ + std::string(name));
}

uint32_t Recorder::track_of(uint32_t slot, std::string_view name) {
  uint32_t track = tracks_[slot].load(std::memory_order_relaxed);
  if (track == kNoTrack) {
    track = track_of(name);
    tracks_[slot].store(track, std::memory_order_relaxed);
  }
  return track;
}

void Recorder::submitted(uint32_t slot, std::string_view name, Kind kind) {
  const int64_t now = steady_now_ns();
  board_.stamp(slot, now);
  if (is_on()) push_submitted(now, track_of(slot, name), kind);
}

void Recorder::record_decision(std::span<const uint32_t> slots, FunctionRef<std::string_view(uint32_t)> name_of,
                               uint64_t place) {
  const int64_t now = steady_now_ns();
  for (const uint32_t slot : slots) {
    const uint32_t track = track_of(slot, name_of(slot));
    for (int local = 0; local < board_.size(); ++local) {
      if (local == local_rank_) continue;
      const auto rank = static_cast<uint64_t>(ranks_[local]);
      timeline_->push({board_.stamp_of(local, slot), rank, track, Event::What::kTick, 0});
    }
    timeline_->push({now, place, track, Event::What::kDecided, 0});
  }
  if (timeline_->marks_cycles()) timeline_->push({now, slots.size(), engine_track_, Event::What::kCycle, 0});
}

void Recorder::decided_miss(std::string_view name) {
  miss_tracks_.push_back(is_on() ? track_of(name) : kNoTrack);
  if (is_on()) push(Event::What::kDecided, miss_tracks_.back(), round_);
}

void Recorder::begin_group(std::span<const Work* const> group) {
  const auto kind = static_cast<uint8_t>(group.front()->signature->kind);
  timeline_->push({steady_now_ns(), group.size(), engine_track_, Event::What::kStarted, kind});
  for (const Work* work : group) {
    const bool is_miss = work->slot >= kMissSlots;
    const uint32_t track =
        is_miss ? miss_tracks_[work->slot - kMissSlots] : tracks_[work->slot].load(std::memory_order_relaxed);
    if (track == kNoTrack) continue;  // decided before the timeline began
    const auto bytes = static_cast<int64_t>(work->signature->bytes());
    timeline_->push({bytes, engine_track_, track, Event::What::kMember, 0});
  }
}

void Recorder::begin_round(uint64_t place) {
  round_ = place;
  push(Event::What::kRoundBegan, rounds_track_, place);
}

}  // namespace ronde
