// How far rank 0's clock is ahead of this rank's: asked by notes, which the watches of both ranks answer at once,
// whatever their programs do.
//
// Of several round trips the shortest counts. The answer was given somewhere in it, most likely in the middle, and
// certainly not more than half of it away from there. Ranks of rank 0's host share its clock.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <span>

#include "communicator.h"
#include "engine/clock_note.h"

namespace ronde {

class ClockOffset {
 public:
  // Is told each result by the watch's thread, or by measure() itself: measured at `ns`; so much is to be added to this
  // rank's clock, give or take the error.
  using Report = std::function<void(int64_t ns, int64_t offset_ns, uint32_t error_ns)>;
  ClockOffset(Communicator& communicator, Report report) : communicator_(communicator), report_(std::move(report)) {}

  // Begins a measurement; a short while later there is a result. Any thread.
  void measure();
  // False if the note is about something else. Never blocks. Throws ProtocolError.
  bool on_note(int peer, std::span<const uint32_t> words);

 private:
  void ask();
  void learn(int64_t asked_ns, int64_t answered_ns, int64_t now_ns);

  Communicator& communicator_;
  Report report_;
  std::mutex measuring_;  // guards the rest
  int left_ = 0;          // round trips to come
  int64_t begun_ns_ = 0;
  int64_t best_trip_ns_ = 0;
  int64_t best_ns_ = 0, offset_ns_ = 0;
};

}  // namespace ronde
