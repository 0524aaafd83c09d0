// What a rank waits for in the calls that its program makes on a communicator, in program order (waits.h). There is at
// most one, as a communicator has one call at a time, and it is seen once it has waited for a second.
//
// A collective's id is its number. A send or receive is known by its two ranks and by how many messages have gone that
// way before: so the rank at the other end can tell whether it has begun its part.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "communicator.h"
#include "waits.h"

namespace ronde {

class CallWaits : public Waits {
 public:
  // `label`: how messages call the communicator.
  CallWaits(Communicator& communicator, std::string label) : communicator_(communicator), label_(std::move(label)) {}

  void visit(const std::function<void(const Item&)>& visit) override;
  std::vector<bool> has(std::span<const uint64_t> ids) override;
  Progress progress() override { return {}; }
  std::string state() override;
  std::string describe(const Item& item) override;

  // A wait that becomes long wakes the inspection by itself (Stalls::on_long_call): nothing to arm.
  void on_wake(std::function<void()>) override {}
  void arm() override {}
  void disarm() override {}

 private:
  bool has_begun(uint64_t id);

  Communicator& communicator_;
  std::string label_;
};

}  // namespace ronde
