#include "engine/timeline.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/steady_clock.h"
#include "engine/recorder.h"
#include "system/block_signals.h"
#include "system/futex.h"

namespace ronde {
namespace {

constexpr int64_t kNapNs = 100'000'000;
constexpr int64_t kLastsNs = 500'000'000;             // a phase that lasts 0.5 s is shown before it ends
constexpr int64_t kBetweenClocksNs = 10'000'000'000;  // 10 s: clocks drift by some 10 us per second

}  // namespace

Timeline::~Timeline() { stop(); }

// --- On and off ----------------------------------------------------------------------------------------------------

void Timeline::start(const Options& options) {
  std::lock_guard lock(switching_);
  if (writer_) throw UsageError("a timeline is already being recorded: stop it before you start another");
  if (!ring_) ring_ = std::make_unique<EventRing>(options.capacity);
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  TraceText::Identity identity{options.rank, options.size, options.host, steady_now_ns(),
                               std::chrono::duration_cast<std::chrono::nanoseconds>(wall).count()};
  file_ = std::make_unique<TraceFile>(options.path);
  text_ = std::make_unique<TraceText>(std::move(identity), *file_);
  for (Event old; ring_->pop(old);) {
  }
  dropped_before_ = ring_->dropped();
  stopping_.store(false);
  marks_cycles_.store(options.marks_cycles);
  {
    const BlockSignals block;
    writer_ = std::make_unique<std::thread>([this] { write(); });
  }
  is_on_.store(true, std::memory_order_release);
  std::lock_guard attached(attaching_);
  for (Recorder* recorder : recorders_) recorder->switched(true);
}

std::string Timeline::stop() {
  if (is_abandoned_.load()) return {};
  std::lock_guard lock(switching_);
  if (!writer_) return {};
  is_on_.store(false, std::memory_order_release);
  {
    std::lock_guard attached(attaching_);
    for (Recorder* recorder : recorders_) recorder->switched(false);
  }
  stopping_.store(true);
  wake();
  writer_->join();
  writer_.reset();
  std::string trouble;
  if (!file_->close()) trouble = std::strerror(file_->error());
  text_.reset();
  file_.reset();
  return trouble;
}

void Timeline::abandon() {
  is_on_.store(false);
  is_abandoned_.store(true);
}

void Timeline::attach(Recorder& recorder) {
  std::lock_guard lock(attaching_);
  recorders_.push_back(&recorder);
  if (is_on()) recorder.switched(true);
}

void Timeline::detach(Recorder& recorder) {
  if (is_abandoned_.load()) return;
  std::lock_guard lock(attaching_);
  std::erase(recorders_, &recorder);
  if (is_on()) recorder.switched(false);
}

// --- Recording -----------------------------------------------------------------------------------------------------

void Timeline::push(const Event& event) {
  const uint64_t number = ring_->push(event);
  const uint32_t sleep = sleep_.load(std::memory_order_seq_cst);
  if (sleep == kAwake) return;
  if (sleep == kSleeping || number % (ring_->capacity() / 4) == 0) wake();
}

uint32_t Timeline::track(std::string_view name) {
  std::lock_guard lock(naming_);
  const auto found = track_of_.find(name);
  if (found != track_of_.end()) return found->second;
  if (names_.size() == kMostTracks) return kMostTracks - 1;
  const auto track = static_cast<uint32_t>(names_.size());
  names_.emplace_back(track == kMostTracks - 1 ? "(more tensors)" : name);
  track_of_.emplace(name, track);
  return track;
}

// --- The writer ----------------------------------------------------------------------------------------------------

void Timeline::write() {
  int64_t clock_ns = steady_now_ns();
  while (true) {
    const bool stops = stopping_.load();
    const bool had_some = drain(*text_, *file_);
    const int64_t now = steady_now_ns();
    const bool all_shown = text_->open_long_phases(stops ? INT64_MAX : now - kLastsNs);
    file_->flush();
    if (stops) return;
    if (had_some && now - clock_ns > kBetweenClocksNs) {
      clock_ns = now;
      std::lock_guard lock(attaching_);
      for (Recorder* recorder : recorders_) recorder->measure_clock();
    }
    // After an unlimited sleep comes a nap, because many more events follow the one that ends the sleep.
    if (!had_some && all_shown) sleep(kSleeping, -1);
    sleep(kNapping, kNapNs);
  }
}

bool Timeline::drain(TraceText& text, TraceFile& file) {
  const size_t at_once = ring_->capacity() / 4;
  size_t taken = 0;
  for (Event event; ring_->pop(event);) {
    write_event(text, event);
    if (++taken % at_once == 0) file.flush();
  }
  const uint64_t dropped = ring_->dropped();
  if (dropped != dropped_before_) text.add_dropped(dropped - std::exchange(dropped_before_, dropped), steady_now_ns());
  return taken > 0;
}

void Timeline::write_event(TraceText& text, const Event& event) {
  if (event.track >= text.tracks() && event.what != Event::What::kClock) {
    std::lock_guard lock(naming_);
    for (size_t track = text.tracks(); track < names_.size(); ++track) text.add_track(names_[track]);
  }
  text.add_event(event);
}

void Timeline::sleep(uint32_t how, int64_t limit_ns) {
  sleep_.store(how, std::memory_order_seq_cst);
  const bool has_news = how == kSleeping && !ring_->is_empty();
  if (!has_news && !stopping_.load()) {
    const timespec limit{limit_ns / 1'000'000'000, limit_ns % 1'000'000'000};
    syscall(SYS_futex, &sleep_, FUTEX_WAIT_PRIVATE, how, limit_ns < 0 ? nullptr : &limit, nullptr, 0);
  }
  sleep_.store(kAwake, std::memory_order_relaxed);
}

void Timeline::wake() {
  if (sleep_.exchange(kAwake, std::memory_order_seq_cst) != kAwake) futex_wake_all(sleep_);
}

}  // namespace ronde
