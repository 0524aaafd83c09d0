// All links of one communicator, and the wait for them. The interface that the algorithms over links use.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "links/link.h"
#include "waiting/waiter.h"

namespace ronde {

class Mesh : private Waiter::Sockets {
 public:
  // `links[peer]` is null for this rank. Without sockets among the links, waiting needs no poll(2).
  Mesh(int rank, std::vector<std::unique_ptr<Link>> links, Waiter& waiter, bool has_sockets = true)
      : rank_(rank), links_(std::move(links)), waiter_(waiter), has_sockets_(has_sockets) {}

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(links_.size()); }
  Link& link(int peer) { return *links_[peer]; }

  // Drives all links until `done()` is true. Throws Failure, MismatchError.
  template <class Done>
  void wait_until(Done&& done) {
    const auto step = [&] {
      // Moving bytes are likely to be followed by more, so do not sleep.
      while (true) {
        const bool moved = progress();
        if (done()) return true;
        if (!moved) return false;
        waiter_.failure().check();
      }
    };
    if (has_sockets_) {
      waiter_.until(step, *this);
    } else {
      waiter_.until(step);
    }
  }

  bool is_pending() const {
    return std::ranges::any_of(links_, [](const auto& link) { return link && link->pending(); });
  }

  void abandon() {
    for (auto& link : links_) {
      if (link) link->abandon();
    }
  }

  // The peers with unfinished messages. For error messages.
  std::vector<int> waiting_for() const {
    std::vector<int> peers;
    for (int peer = 0; peer < size(); ++peer) {
      if (links_[peer] && links_[peer]->pending()) peers.push_back(peer);
    }
    return peers;
  }

 private:
  bool progress() {
    bool moved = false;
    for (auto& link : links_) {
      if (link && link->pending()) moved |= link->progress();
    }
    return moved;
  }
  void add_poll(std::vector<pollfd>& fds) const override {
    for (const auto& link : links_) {
      if (link && link->pending()) link->add_poll(fds);
    }
  }
  void take_poll(std::span<const pollfd> fds) noexcept override {
    for (const auto& link : links_) {
      if (link && link->pending()) fds = fds.subspan(link->take_poll(fds));
    }
  }

  int rank_;
  std::vector<std::unique_ptr<Link>> links_;
  Waiter& waiter_;
  bool has_sockets_;
};

}  // namespace ronde
