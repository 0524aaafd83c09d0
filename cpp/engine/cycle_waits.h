// What a rank waits for in an engine: the tensors that it has submitted and that are not through (waits.h).
#pragma once

#include <functional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/cycle.h"
#include "waits.h"

namespace ronde {

class CycleWaits : public Waits {
 public:
  explicit CycleWaits(Cycle& cycle) : cycle_(cycle) {}

  void visit(const std::function<void(const Item&)>& visit) override {
    cycle_.visit_pending([&](const std::string& name, Kind kind, const Completion& completion) {
      visit({hash_of(name), name, name_of(kind), completion.since_ns(), completion.is_running(),
             completion.is_awaited()});
    });
  }
  std::vector<bool> has(std::span<const uint64_t> ids) override {
    std::unordered_set<uint64_t> here;
    if (!ids.empty()) {
      cycle_.visit_pending([&](const std::string& name, Kind, const Completion&) { here.insert(hash_of(name)); });
    }
    const bool has_joined = cycle_.has_joined();  // nobody waits for it to submit anything
    std::vector<bool> has;
    for (const uint64_t id : ids) has.push_back(has_joined || here.contains(id));
    return has;
  }
  Progress progress() override {
    const Cycle::Arrivals arrivals = cycle_.arrivals();
    return {cycle_.progress(), cycle_.is_in_cold_round(), {arrivals.tensors, arrivals.last, arrivals.waited_ns}};
  }
  std::string state() override { return ""; }
  std::string describe(const Item& item) override { return "for '" + item.name + "' (" + item.kind + ")"; }

  void on_wake(std::function<void()> call) override { cycle_.pending().on_wake(std::move(call)); }
  void arm() override { cycle_.pending().arm(); }
  void disarm() override { cycle_.pending().disarm(); }

 private:
  Cycle& cycle_;
};

}  // namespace ronde
