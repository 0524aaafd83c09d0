// Measures how far rank 0's clock is ahead of this rank's, by notes that rank 0's watch answers at once, whatever its
// program does.
//
// Of several round trips the shortest counts. Rank 0 answered most likely in its middle, and certainly at most half of
// the trip away from there. Ranks on rank 0's host share its clock.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <span>

#include "communicator/communicator.h"

namespace ronde {

class ClockOffset {
 public:
  // Called with each result, by the watch's thread or by measure(): at `ns`, this rank's clock plus `offset_ns` was
  // rank 0's clock, give or take `error_ns`.
  using Report = std::function<void(int64_t ns, int64_t offset_ns, uint32_t error_ns)>;
  ClockOffset(Communicator& communicator, Report report) : communicator_(communicator), report_(std::move(report)) {}

  // Begins a measurement, which calls Report when it is complete. Any thread.
  void measure();
  // Returns false if the note is not about clocks. Never blocks. Throws ProtocolError.
  bool on_note(int peer, std::span<const uint32_t> words);

 private:
  void ask_time();
  void add_answer(int64_t asked_ns, int64_t answered_ns, int64_t now_ns);

  Communicator& communicator_;
  Report report_;
  std::mutex measuring_;  // guards the rest
  int left_ = 0;          // remaining round trips
  int64_t begun_ns_ = 0;
  int64_t best_trip_ns_ = 0;
  int64_t best_ns_ = 0, offset_ns_ = 0;
};

}  // namespace ronde
