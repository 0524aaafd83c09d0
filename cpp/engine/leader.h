// Decides what runs next. Every host has a leader, its first rank; rank 0 leads its host and decides for all.
//
// A leader sees on the board which tensors all ranks of its host have submitted. Between hosts the leaders talk by
// notes, along a tree (tree.h): each tells its parent what is ready on its host and on all that are under it. Rank 0
// writes what is ready everywhere into its log and sends it to its children; each leader passes it on to its own and
// writes it into its log. The same with cold rounds: whoever needs one gets it for all.
//
// Why nothing is counted twice or lost: what a child has reported is forgotten when the tensor's entry, or that of a
// cold round, is written into the log of whom it reported to. The child gets that entry only from there, so what it
// reports afterwards is of the tensor's next turn. A report tells how many cold rounds its sender's log has; its sender
// can only be behind, and if it is, the report is void and will come again. Leaders report only when all ranks of their
// host are through with the last round, so what counts as ready somewhere was submitted to what the slot now holds.
//
// Why nobody waits in vain: a leader passes an entry on before it takes it itself, so all ranks get to know whatever
// one of them has begun to run.
//
// While nobody waits for any of what is ready, a decision lingers a moment for more: a burst of small tensors then
// costs little more than one.
//
// Not thread-safe, except for on_note(), has_mail(), has_news(), batch_bytes() and linger_left_ns().
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "communicator.h"
#include "engine/board.h"
#include "engine/leader_note.h"
#include "engine/tree.h"

namespace ronde {

class Leader {
 public:
  // `linger_ns`: so long a decision may wait. `arity`: as in tree.h, the same on all ranks.
  Leader(Communicator& communicator, const Board& board, size_t capacity, int64_t linger_ns, size_t arity);

  // True if this rank leads its host; the rest is for such ranks only.
  bool leads() const { return leads_; }

  // A decision may wait `linger_ns` for more; so many bytes are worth one of their own. Alike on all ranks of a host.
  void set_batching(int64_t linger_ns, uint64_t batch_bytes);
  int64_t linger_ns() const { return linger_ns_; }
  uint64_t batch_bytes() const { return batch_bytes_.load(std::memory_order_relaxed); }

  // Looks what has changed. True if the log has grown.
  bool look();
  bool has_news() const { return board_.changes() != seen_.load(); }
  // How long until look() decides even if nothing changes; -1 if it would not.
  int64_t linger_left_ns() const;

  // A note from another leader arrives in the mailbox; read_mail() acts on what is there. Both throw ProtocolError if a
  // note is none, or its sender may not say so: only children tell what is ready, only the parent what runs.
  void on_note(int peer, std::span<const uint32_t> words);
  bool has_mail() const { return has_mail_.load(); }
  void read_mail();

 private:
  bool decides() const { return communicator_.rank() == 0; }
  bool all_are_through() const;
  uint64_t round_wanted() const;
  bool is_round_wanted() const { return round_wanted() > cold_appended_; }
  bool want_round();
  bool decide(bool at_once);
  bool is_urgent();
  void stop_lingering();
  std::vector<uint32_t> ready_slots() const;
  void report(const std::vector<uint32_t>& slots);
  void send_up(std::span<const uint32_t> note) { communicator_.watch().send_note(parent_, note); }
  void read(int peer, const LeaderNote& note);
  void hear_ready(int peer, const LeaderNote& note);
  void hear_want(int peer, const LeaderNote& note);
  void hear_entry(int peer, const LeaderNote& note);
  size_t child_of(int peer) const;
  void publish(const std::vector<uint32_t>& entry);
  void append(const std::vector<uint32_t>& entry);

  Communicator& communicator_;
  const Board& board_;
  size_t capacity_;
  int64_t linger_ns_;
  std::atomic<uint64_t> batch_bytes_{1 << 20};
  bool leads_;
  bool has_other_hosts_;
  int parent_ = -1;            // the leader to report to
  std::vector<int> children_;  // the leaders who report to this one

  std::vector<uint64_t> rest_;     // by word: the position of bits that are not submitted
  std::atomic<uint64_t> seen_{0};  // the board's changes at the last look
  uint64_t hurries_seen_ = 0;
  std::atomic<int64_t> linger_until_{0};  // 0: it does not linger
  uint64_t cold_appended_ = 0;
  uint64_t cold_reported_ = 0;      // the latest round that this leader has asked its parent for
  std::vector<uint64_t> reported_;  // by word: slots that the parent has been told of
  // What the children have told.
  std::vector<std::vector<uint64_t>> ready_under_;  // by child, by word
  uint64_t cold_asked_ = 0;

  struct Mail {
    int peer;
    LeaderNote note;
  };
  std::mutex mailing_;
  std::vector<Mail> mail_;
  std::atomic<bool> has_mail_{false};
  std::vector<uint32_t> arriving_;  // an entry of which more is to come
};

}  // namespace ronde
