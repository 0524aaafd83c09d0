// The board: shared memory in which the ranks of one host publish the tensors that they have submitted, and read the
// decisions of their leader.
//
// It lies in symmetric memory, one part per rank:
//   - bits: one per cache slot. A rank flips its bit when it submits the slot's tensor. The tensor is ready on the host
//     when all ranks have flipped. A decision to run it makes "flipped" the new rest position, so no rank ever clears a
//     bit that another may be setting.
//   - counters, which only the part's owner writes, except where noted. The leader does not wait for the bit of a rank
//     that has joined. That rank flips its bit when it has taken the decision; until then the tensor is not decided
//     again.
//   - stamps, for timelines (recorder.h): for each bit and each of its two positions, when the rank last flipped to it.
//   - the log: the leader's decisions in order. Only the log in the part of the leader (the host's first rank) is used.
//     Every rank reads it at its own pace. An entry is a number n and the n slots to run, or kNegotiationEntry: a round
//     of negotiation.
//
// The log never overflows. A slot is decided again only when all ranks have flipped its bit again, so each has taken
// the earlier decision; and a rank is at most one negotiation round behind.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "waiting/bell.h"

namespace ronde {

inline constexpr uint32_t kNegotiationEntry = UINT32_MAX;

class Board {
 public:
  static size_t bytes(size_t capacity) { return Layout(capacity).bytes; }

  // `parts`: by local rank, bytes() each, initially zero.
  Board(std::vector<std::byte*> parts, int own, size_t capacity)
      : layout_(capacity), parts_(std::move(parts)), own_(own) {}

  struct alignas(128) Counters {
    std::atomic<uint64_t> changes{0};             // grows after every change that the leader may wait for
    std::atomic<uint64_t> negotiation_wanted{0};  // the number (from 1 on) of the round that this rank needs
    std::atomic<uint64_t> negotiations_done{0};   // negotiation rounds that this rank has finished
    std::atomic<uint64_t> hurries{0};             // requests of this rank to run ready tensors at once
    std::atomic<uint32_t> waiting{0};             // threads that wait for a tensor
    std::atomic<uint32_t> drivers{0};     // waiting threads that read the log, awake or asleep on the drivers' bell
    std::atomic<uint32_t> has_joined{0};  // this rank has run out of data; changes only in negotiation rounds
    // Used in the leader's part only. All ranks write them.
    alignas(128) std::atomic<uint32_t> lingers{0};    // the leader waits for more tensors before it decides
    std::atomic<uint64_t> ready_bytes{0};             // became ready since the leader's last decision
    alignas(128) std::atomic<uint32_t> timelines{0};  // ranks of this host that write a timeline
  };

  int size() const { return static_cast<int>(parts_.size()); }
  size_t words() const { return layout_.words; }
  Counters& counters(int local) const { return *reinterpret_cast<Counters*>(parts_[local]); }
  Counters& counters() const { return counters(own_); }
  std::atomic<uint64_t>* bits(int local) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(parts_[local] + layout_.bits);
  }

  // Publishes a change to the leader.
  void note_change() const { counters().changes.fetch_add(1, std::memory_order_seq_cst); }
  uint64_t changes() const {
    uint64_t sum = 0;
    for (int local = 0; local < size(); ++local) sum += counters(local).changes.load(std::memory_order_seq_cst);
    return sum;
  }

  uint64_t hurries() const {
    uint64_t sum = 0;
    for (int local = 0; local < size(); ++local) sum += counters(local).hurries.load(std::memory_order_seq_cst);
    return sum;
  }
  // Returns the bytes that have become ready since the leader's last decision.
  uint64_t add_ready_bytes(uint64_t bytes) const {
    return counters(0).ready_bytes.fetch_add(bytes, std::memory_order_seq_cst) + bytes;
  }
  bool any_thread_waits() const {
    for (int local = 0; local < size(); ++local) {
      if (counters(local).waiting.load(std::memory_order_seq_cst) > 0) return true;
    }
    return false;
  }

  // Flips this rank's bit of a slot. True if all ranks of the host have now flipped theirs.
  bool flip(uint32_t slot) const {
    const uint64_t mask = uint64_t{1} << (slot % 64);
    const bool bit = (bits(own_)[slot / 64].fetch_xor(mask, std::memory_order_seq_cst) & mask) == 0;
    for (int local = 0; local < size(); ++local) {
      const bool is_same = ((bits(local)[slot / 64].load(std::memory_order_seq_cst) & mask) != 0) == bit;
      if (!is_same && counters(local).has_joined.load(std::memory_order_relaxed) == 0) return false;
    }
    return true;
  }

  // Whether ranks stamp their submissions: some rank of this host writes a timeline.
  bool is_timed() const { return counters(0).timelines.load(std::memory_order_relaxed) != 0; }
  void count_timeline(int change) const { counters(0).timelines.fetch_add(static_cast<uint32_t>(change)); }
  // Call it before flip(), when this rank submits the slot's tensor.
  void stamp(uint32_t slot, int64_t ns) const {
    stamp_at(own_, slot, !own_bit(slot)).store(ns, std::memory_order_relaxed);
  }
  // The time at which a rank of this host submitted the slot's tensor, which is decided and not yet finished here.
  int64_t stamp_of(int local, uint32_t slot) const {
    return stamp_at(local, slot, own_bit(slot)).load(std::memory_order_relaxed);
  }

  // Wakes the thread that reads the log, if it sleeps: a driver if there is one, else the engine's thread. Call it
  // after publishing.
  void ring(int local) const {
    BellHandle::publish_before_ringing();
    // Sequentially consistent, as all loads in Cycle::has_work() must be: a driver leaves and then checks once more;
    // this rank publishes and then checks for a driver. So one of the two sees the other, on every processor.
    const bool has_driver = counters(local).drivers.load(std::memory_order_seq_cst) != 0;
    (has_driver ? drivers_bell(local) : bell(local)).ring_after_publishing();
  }
  // The bell of the engine's thread.
  BellHandle bell(int local) const { return BellHandle(bells(local)); }
  // One driver may sleep on it.
  BellHandle drivers_bell(int local) const { return BellHandle(bells(local) + 1); }

  // The log. Only the leader calls append().
  void append(std::span<const uint32_t> entry) const {
    std::atomic<uint64_t>& end = log_end();
    uint64_t at = end.load(std::memory_order_relaxed);
    for (uint32_t word : entry) log()[at++ % layout_.log_words] = word;
    end.store(at, std::memory_order_seq_cst);
  }
  bool has_entry(uint64_t taken) const { return log_end().load(std::memory_order_seq_cst) != taken; }
  uint32_t word(uint64_t at) const { return log()[at % layout_.log_words]; }

 private:
  struct Layout {
    explicit Layout(size_t capacity) : words((capacity + 63) / 64), log_words(std::bit_ceil(4 * capacity + 64)) {
      bell = sizeof(Counters);
      bits = bell + 2 * sizeof(Bell);
      stamps = bits + (words * 8 + 127) / 128 * 128;
      log_end = stamps + (words * 64 * 2 * sizeof(int64_t) + 127) / 128 * 128;
      log = log_end + 128;
      bytes = log + log_words * sizeof(uint32_t);
    }
    size_t words, log_words;
    size_t bell, bits, stamps, log_end, log, bytes;  // offsets
  };

  Bell* bells(int local) const { return reinterpret_cast<Bell*>(parts_[local] + layout_.bell); }
  std::atomic<uint64_t>& log_end() const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(parts_[0] + layout_.log_end);
  }
  bool own_bit(uint32_t slot) const {
    return (bits(own_)[slot / 64].load(std::memory_order_relaxed) >> (slot % 64) & 1) != 0;
  }
  std::atomic<int64_t>& stamp_at(int local, uint32_t slot, bool position) const {
    return reinterpret_cast<std::atomic<int64_t>*>(parts_[local] + layout_.stamps)[2 * slot + (position ? 1 : 0)];
  }
  uint32_t* log() const { return reinterpret_cast<uint32_t*>(parts_[0] + layout_.log); }

  Layout layout_;
  std::vector<std::byte*> parts_;
  int own_;
};

}  // namespace ronde
