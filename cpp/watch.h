// The failure detector: one thread that listens on a control connection to every other rank, and sleeps otherwise.
//
// The rules:
//   1. End of file, or an error, without a goodbye means that the rank is lost. The kernel closes a dead process's
//      sockets, so a death on any host is heard by every rank at once; a host that falls silent is found by keepalive.
//   2. A goodbye carries the number of collective calls its rank has made. It is a loss only for whoever needs that
//      rank in a later call.
//   3. Whoever learns of a failure first tells everyone; the first failure heard wins (FailureState).
// A rank that is merely stopped keeps its connections, so it is waited for.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bell.h"
#include "failure_state.h"

namespace ronde {

class Watch {
 public:
  // Takes over the connected sockets `controls` (rank -> descriptor). `names[rank]`: how errors call it.
  Watch(int rank, std::vector<std::string> names, const std::map<int, int>& controls, BellRope own,
        FailureState& failure);
  ~Watch() { stop(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Call number `number` (counted from 0) begins here. Throws Failure if a rank said goodbye before it.
  void begin_call(uint64_t number);
  // True if `rank` has said goodbye: it will neither send nor receive any more.
  bool has_left(int rank) const { return departures_[rank].load(std::memory_order_acquire) != kPresent; }
  const std::string& name(int rank) const { return names_[rank]; }

  void ring_own() const { own_.ring(); }  // wakes a call that waits, for it to notice a failure
  void say_goodbye(uint64_t calls_made);
  // Ends the thread and closes the connections: to the others this looks like a death unless say_goodbye() came first.
  void stop();
  // Tells every rank what failed here.
  void tell_all(const Failure& failure);

 private:
  static constexpr uint64_t kPresent = UINT64_MAX;

  struct Message;
  void run();
  // False when nothing more will come from this peer.
  bool hear(int peer, int fd);
  void handle(int peer, const Message& message);
  void lost(int peer, int error);
  void report(FailureKind kind, int rank, const std::string& reason);
  void send_to_all(const Message& message);
  void note_departure(int peer, uint64_t calls_made);
  std::string departure_reason(int peer) const;

  int rank_;
  std::vector<std::string> names_;
  std::map<int, int> controls_;  // unchanged while the thread runs
  std::mutex sending_;           // whole messages only, and none after stop()
  BellRope own_;
  FailureState& failure_;
  int stop_fd_;
  std::vector<std::atomic<uint64_t>> departures_;  // per rank: the calls it made before it left, or kPresent
  std::atomic<uint64_t> calls_begun_{0};
  std::atomic<int> left_count_{0};
  std::thread thread_;
};

}  // namespace ronde
