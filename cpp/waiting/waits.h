// The waits of a rank on one communicator, as the stall inspection (stalls.h) reads them: for calls in program order
// (call_waits.h), or for named tensors of the engine (engine/cycle_waits.h). All functions: any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ronde {

inline uint64_t hash_of(std::string_view text) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325;
  for (const char character : text) hash = (hash ^ static_cast<unsigned char>(character)) * 0x100000001b3;
  return hash;
}

class Waits {
 public:
  // A call or a tensor that this rank has begun and not finished.
  struct Item {
    uint64_t id = 0;  // equal on all ranks
    std::string name;
    std::string kind;
    int64_t since_ns = 0;
    bool is_running = false;  // all ranks have begun it, and this rank executes it
    bool is_awaited = false;  // a thread sleeps until it is finished
  };
  // Totals, as in Cycle::Arrivals.
  struct Arrivals {
    uint64_t tensors = 0;
    uint64_t last = 0;
    int64_t waited_ns = 0;
  };
  struct Progress {
    uint64_t calls = 0;  // grows as the engine's thread makes progress; 0 without an engine
    bool is_in_negotiation = false;
    Arrivals arrivals{};
  };

  virtual ~Waits() = default;
  virtual void visit(const std::function<void(const Item&)>& visit) = 0;
  // Whether no other rank has to wait until this one begins ids[i].
  virtual std::vector<bool> have_begun(std::span<const uint64_t> ids) = 0;
  virtual Progress progress() = 0;
  // This rank's progress, as the predicate of a sentence about it; may be empty.
  virtual std::string state() = 0;
  // "in call 7 on world: allreduce of 4 float32 by sum", "for 'a' (allreduce)"
  virtual std::string describe(const Item& item) = 0;

  // After arm(), the function passed to on_wake() is called once when something begins. Set it before arm().
  virtual void on_wake(std::function<void()> call) = 0;
  virtual void arm() = 0;
  virtual void disarm() = 0;
};

}  // namespace ronde
