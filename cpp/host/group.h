// The ranks that take part in one algorithm over links: all of a mesh or some of them. They have the numbers 0, 1, ...
// in the group, and the algorithms know only these.
#pragma once

#include <span>

#include "links/mesh.h"

namespace ronde {

// One message in flight.
class Transfer {
 public:
  enum class Direction { kSend, kReceive };

  Transfer() = default;  // no message: done
  Transfer(Link& link, Direction direction, Ticket ticket) : link_(&link), direction_(direction), ticket_(ticket) {}

  bool done() const {
    if (link_ == nullptr) return true;
    return (direction_ == Direction::kSend ? link_->sent() : link_->received()) >= ticket_;
  }

 private:
  Link* link_ = nullptr;
  Direction direction_ = Direction::kSend;
  Ticket ticket_ = 0;
};

class Group {
 public:
  // All ranks of the mesh.
  Group(Mesh& mesh) : mesh_(mesh), rank_(mesh.rank()), size_(mesh.size()) {}  // NOLINT(google-explicit-constructor)

  // The ranks `members` of the mesh, which include this one. Every member must pass the same ranks in the same order;
  // in ascending order sums are formed in rank order. `members` must outlive the group.
  Group(Mesh& mesh, std::span<const int> members)
      : mesh_(mesh), members_(members), rank_(0), size_(static_cast<int>(members.size())) {
    while (members_[rank_] != mesh.rank()) ++rank_;
  }

  int rank() const { return rank_; }
  int size() const { return size_; }

  Transfer send(int to, const Call& call, const void* data, size_t bytes) const {
    Link& link = link_to(to);
    return Transfer(link, Transfer::Direction::kSend, link.send(call, data, bytes));
  }
  Transfer recv(int from, const Call& call, void* data, size_t bytes) const {
    Link& link = link_to(from);
    return Transfer(link, Transfer::Direction::kReceive, link.recv(call, data, bytes));
  }

  // Drives all links until the transfers are done. Throws Failure, MismatchError.
  void wait(const Transfer& transfer) const { wait(std::span(&transfer, 1)); }
  void wait(std::span<const Transfer> transfers) const {
    size_t done = 0;
    mesh_.wait_until([&] {
      while (done < transfers.size() && transfers[done].done()) ++done;
      return done == transfers.size();
    });
  }

 private:
  Link& link_to(int member) const { return mesh_.link(members_.empty() ? member : members_[member]); }

  Mesh& mesh_;
  std::span<const int> members_;  // empty: all
  int rank_;
  int size_;
};

}  // namespace ronde
