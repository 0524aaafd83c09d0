// The wait of a rank in the program's calls on a communicator (waits.h). There is at most one, because a communicator
// runs one call at a time. It is visible once it has lasted a second.
//
// A collective's id is its number. The id of a send or receive consists of its two ranks and the number of earlier
// messages in that direction, so the rank at the other end can tell whether it has begun its part.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "communicator/communicator.h"
#include "waiting/waits.h"

namespace ronde {

class CallWaits : public Waits {
 public:
  // `label`: the communicator's name in messages.
  CallWaits(Communicator& communicator, std::string label) : communicator_(communicator), label_(std::move(label)) {}

  void visit(const std::function<void(const Item&)>& visit) override;
  std::vector<bool> have_begun(std::span<const uint64_t> ids) override;
  Progress progress() override { return {}; }
  std::string state() override;
  std::string describe(const Item& item) override;

  // Nothing to arm: a long wait wakes the stall inspection through Stalls::on_long_call.
  void on_wake(std::function<void()>) override {}
  void arm() override {}
  void disarm() override {}

 private:
  bool has_begun(uint64_t id);

  Communicator& communicator_;
  std::string label_;
};

}  // namespace ronde
