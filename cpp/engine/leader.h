// Decides which tensors run next. Every host has a leader, its first rank; rank 0 leads its host and decides for all.
//
// A leader reads on the board which tensors all ranks of its host have submitted. Between hosts the leaders exchange
// notes along a tree (tree.h): each reports to its parent the tensors that are ready on its host and on all hosts below
// it. Rank 0 writes the tensors that are ready everywhere into its log and sends the entry to its children. Each leader
// forwards it to its own children and writes it into its own log. Negotiation rounds work the same way: a request by
// one rank starts a round for all.
//
// Why no report is counted twice or lost: a parent forgets a child's report when it writes the tensor's entry, or that
// of a negotiation round, into its log. The child gets that entry only from its parent, so its later reports concern
// the tensor's next submission. A report carries the number of negotiation rounds in its sender's log. The sender can
// only be behind; if it is, the parent ignores the report, and the sender repeats it after the round. Leaders report
// only when all ranks of their host have finished the last round, so a report always concerns the slot's current
// tensor.
//
// Every rank that waits gets its operation: a leader forwards an entry before it takes the entry, so all ranks learn of
// every operation that one of them has begun.
//
// While no thread waits for a ready tensor, the leader lingers: it delays its decision a moment for more tensors. So a
// burst of small tensors costs little more than one.
//
// Not thread-safe, except for include_slot(), on_note(), has_mail(), has_news(), batch_bytes() and linger_left_ns().
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "communicator/communicator.h"
#include "engine/board.h"
#include "engine/leader_note.h"

namespace ronde {

class Leader {
 public:
  // `linger_ns`: how long a decision may wait. `arity`: as in tree.h, the same on all ranks.
  Leader(Communicator& communicator, const Board& board, size_t capacity, int64_t linger_ns, size_t arity);

  // True if this rank leads its host. Only such a rank may call the rest.
  bool leads() const { return leads_; }

  // A decision may wait `linger_ns` for more tensors, unless `batch_bytes` are ready. All ranks of a host must pass the
  // same values.
  void set_batching(int64_t linger_ns, uint64_t batch_bytes);
  int64_t linger_ns() const { return linger_ns_; }
  uint64_t batch_bytes() const { return batch_bytes_.load(std::memory_order_relaxed); }

  // The slot holds a tensor from now on. Call it in the negotiation round that assigns the slot.
  void include_slot(uint32_t slot) { words_in_use_.store(std::max<size_t>(words_in_use_.load(), slot / 64 + 1)); }

  // Reads the board and decides or reports the ready tensors. True if the log has grown.
  bool check_board();
  bool has_news() const { return board_.changes() != seen_.load(); }
  // The time until check_board() decides even without a change; -1 if it does not linger.
  int64_t linger_left_ns() const;

  // on_note() puts another leader's note into the mailbox; read_mail() acts on the notes there. Both throw
  // ProtocolError if a note is malformed or its sender has no right to it: only children report readiness and requests,
  // only the parent sends entries.
  void on_note(int peer, std::span<const uint32_t> words);
  bool has_mail() const { return has_mail_.load(); }
  void read_mail();

 private:
  bool decides() const { return communicator_.rank() == 0; }
  bool all_ranks_finished_round() const;
  uint64_t round_wanted() const;
  bool is_round_wanted() const { return round_wanted() > negotiations_appended_; }
  bool request_round();
  bool decide(bool at_once);
  bool is_urgent();
  void stop_lingering();
  std::vector<uint32_t> ready_slots() const;
  void report(const std::vector<uint32_t>& slots);
  void send_up(std::span<const uint32_t> note) { communicator_.watch().send_note(parent_, note); }
  void handle_note(int peer, const LeaderNote& note);
  void on_ready(int peer, const LeaderNote& note);
  void on_want(int peer, const LeaderNote& note);
  void on_entry(int peer, const LeaderNote& note);
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
  std::vector<int> children_;  // the leaders that report to this one

  std::atomic<size_t> words_in_use_{0};  // of the board's bits: the coordinator assigns the lowest free slots
  std::vector<uint64_t> rest_;           // by word: the position of bits that are not submitted
  std::atomic<uint64_t> seen_{0};        // the board's changes at the last check_board()
  uint64_t hurries_seen_ = 0;
  std::atomic<int64_t> linger_until_{0};  // 0: does not linger
  uint64_t negotiations_appended_ = 0;
  uint64_t negotiation_reported_ = 0;  // the latest round that this leader has requested from its parent
  std::vector<uint64_t> reported_;     // by word: the slots reported to the parent
  // From the children's notes.
  std::vector<std::vector<uint64_t>> ready_under_;  // by child, by word
  uint64_t negotiation_asked_ = 0;

  struct Mail {
    int peer;
    LeaderNote note;
  };
  std::mutex mailing_;
  std::vector<Mail> mail_;
  std::atomic<bool> has_mail_{false};
  std::vector<uint32_t> arriving_;  // the parts of an incomplete entry
};

}  // namespace ronde
