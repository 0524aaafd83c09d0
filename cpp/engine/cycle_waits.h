// A rank's waits in an engine (waits.h): for the tensors that it has submitted and that are not finished, and for the
// other ranks in join() while the engine runs nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/cycle.h"
#include "waiting/waits.h"

namespace ronde {

class CycleWaits : public Waits {
 public:
  explicit CycleWaits(Cycle& cycle) : cycle_(cycle) {}

  void visit(const std::function<void(const Item&)>& visit) override {
    cycle_.visit_pending([&](const std::string& name, Kind kind, const Completion& completion) {
      visit({hash_of(name), name, name_of(kind), completion.since_ns(), completion.is_running(),
             completion.is_awaited()});
    });
    if (cycle_.has_joined()) {
      visit({.id = kJoinId, .name = "join()", .kind = kJoin, .since_ns = idle_since_ns(), .is_awaited = true});
    }
  }
  std::vector<bool> have_begun(std::span<const uint64_t> ids) override {
    std::unordered_set<uint64_t> here;
    if (!ids.empty()) {
      cycle_.visit_pending([&](const std::string& name, Kind, const Completion&) { here.insert(hash_of(name)); });
    }
    const bool has_joined = cycle_.has_joined();  // no rank waits for its submissions
    std::vector<bool> has;
    for (const uint64_t id : ids) has.push_back(has_joined || here.contains(id));
    return has;
  }
  Progress progress() override {
    const Cycle::Arrivals arrivals = cycle_.arrivals();
    return {cycle_.progress(), cycle_.is_in_negotiation(), {arrivals.tensors, arrivals.last, arrivals.waited_ns}};
  }
  std::string state() override { return ""; }
  std::string describe(const Item& item) override {
    if (item.kind == kJoin) return "in join()";
    return "for '" + item.name + "' (" + item.kind + ")";
  }

  void on_wake(std::function<void()> call) override { cycle_.pending().on_wake(std::move(call)); }
  void arm() override { cycle_.pending().arm(); }
  void disarm() override { cycle_.pending().disarm(); }

 private:
  static constexpr const char* kJoin = "join";                                    // not the kind of any tensor
  inline static const uint64_t kJoinId = hash_of(std::string_view("\0join", 5));  // not the name of any tensor

  // The time since which nothing has run, as far as the calls of this function show.
  int64_t idle_since_ns() {
    std::lock_guard lock(mutex_);
    if (const uint64_t now = cycle_.progress(); now != seen_progress_) {
      seen_progress_ = now;
      idle_since_ns_ = coarse_now_ns();
    }
    return idle_since_ns_;
  }

  Cycle& cycle_;
  std::mutex mutex_;
  uint64_t seen_progress_ = UINT64_MAX;
  int64_t idle_since_ns_ = 0;
};

}  // namespace ronde
