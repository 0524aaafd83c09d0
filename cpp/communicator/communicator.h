// A communicator: a fixed set of ranks that make the same calls in the same order, and the channels between them.
//
// It owns one rank's share of these channels: the host's shared memory, the links, and its part of the failure
// detector, whose connections all communicators of the process share. All connections arrive here connected and
// authenticated (ronde/comm/bootstrap.py); this code neither resolves names nor listens nor connects.
//
// Its errors:
//   UsageError     the arguments are invalid; nothing was sent, the next call works.
//   MismatchError  the ranks made different calls. The ranks of one host all notice before any byte moves, and the next
//                  call works; between hosts, and in send/receive, the communicator has failed.
//   Failure        the communicator has failed; every later call throws the same.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "algorithms/hierarchical.h"
#include "algorithms/over_links.h"
#include "algorithms/select.h"
#include "base/function_ref.h"
#include "failures/failure_state.h"
#include "failures/watch.h"
#include "host/host_group.h"
#include "host/host_segment.h"
#include "host/symmetric.h"
#include "links/connection.h"
#include "links/mesh.h"
#include "system/descriptor.h"
#include "waiting/waiter.h"

namespace ronde {

struct Options {
  Algorithm allreduce = Algorithm::kAuto;
  SwitchOver switch_over = {};
  size_t staging_bytes = 256 * 1024;
  int64_t timeout_ns = 0;
  int spin_us = -1;  // -1: depends on the number of ranks per core
  bool adasum_hierarchical = false;
  bool hierarchical_allgather = true;  // between hosts with the same number of ranks
  bool seals_payload = false;          // tensors, too, carry tags between hosts
};

struct Wiring {
  int rank = 0;
  std::vector<std::string> hosts;                // by rank: the name of its host
  std::vector<int> host_of;                      // by rank: the number of its host
  int cores = 1;                                 // cores on which any rank of this host may run
  std::shared_ptr<Mapping> segment;              // the host's shared memory, HostSegment::bytes() long
  std::unique_ptr<Watch> watch;                  // already receives messages
  std::map<int, std::vector<Connection>> data;   // data connections with keys, by rank on another host
  std::shared_ptr<SymmetricSegments> symmetric;  // those of a communicator of the same ranks; null: creates its own
};

class Communicator : private Waiter::Listener {
 public:
  Communicator(Wiring wiring, const Options& options);
  ~Communicator() override;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(hosts_.size()); }
  const std::string& host(int rank) const { return hosts_[rank]; }

  // Collectives. Counts are elements, sizes are bytes; spans have one entry per rank. They throw the errors above.
  // `shape`: the word of a shape that must be equal on all ranks (shape_word.h); 0: none. `divisor`: of an average; 0:
  // the number of ranks.
  void allreduce(const void* in, void* out, size_t count, DType dtype, ReduceOp op, int divisor = 0,
                 uint64_t shape = 0);
  // All-reduce with kAdasum of several vectors that lie one behind the other, each with its own weights.
  void adasum(const void* in, void* out, std::span<const size_t> counts, DType dtype, uint64_t shape = 0);
  // Throws UsageError unless this communicator can combine such values by Adasum.
  void check_adasum(DType dtype) const;
  void reduce(const void* in, void* out, size_t count, DType dtype, ReduceOp op, int root, uint64_t shape = 0);
  void reduce_scatter(const void* in, void* out, std::span<const size_t> counts, DType dtype, ReduceOp op,
                      int divisor = 0, uint64_t shape = 0);
  void allgather(const void* in, void* out, std::span<const size_t> sizes, DType dtype);
  // `kind`: the operation that this broadcast is a part of, for the comparison of calls. `sealed`, here and below: the
  // payload carries tags between hosts whatever the options.
  void broadcast(void* data, size_t count, DType dtype, int root, Kind kind = Kind::kBroadcast, uint64_t shape = 0,
                 bool sealed = false);
  void gather(const void* in, void* out, std::span<const size_t> sizes, DType dtype, int root);
  void scatter(const void* in, void* out, std::span<const size_t> sizes, DType dtype, int root);
  void alltoall(const void* in, std::span<const size_t> in_sizes, void* out, std::span<const size_t> out_sizes,
                DType dtype, uint64_t shape = 0, bool sealed = false);

  // The same operations if not every rank knows the sizes, in two calls. The first one tells the sizes, after which the
  // caller can make room for the result; small blocks travel along. The second call moves the others. One thread makes
  // both. No other collective call may come in between: it fails the communicator, because it may have taken the place
  // of the second call on some ranks only.
  //
  // An all-gather, or a gather if root >= 0. `items`, the elements per row, must agree. rows_of_ranks[p]: of rank p.
  void begin_gather(const void* in, uint64_t rows, uint64_t items, DType dtype, int root, uint64_t shape,
                    std::span<uint64_t> rows_of_ranks);
  void end_gather(const void* in, void* out, std::span<const size_t> sizes, DType dtype, int root);
  // `rows[p]`: for rank p. arriving[p]: from rank p.
  void begin_alltoall(const void* in, std::span<const uint64_t> rows, uint64_t items, DType dtype, uint64_t shape,
                      std::span<uint64_t> arriving);
  void end_alltoall(const void* in, std::span<const size_t> in_sizes, void* out, std::span<const size_t> out_sizes,
                    DType dtype, uint64_t shape);
  // `words`: the type of the root's array, then the lengths of its axes; at the end on all ranks. Only the root passes
  // them, `in` and `sizes`.
  static constexpr size_t kScatterWords = HostGroup::kMostWords;
  void begin_scatter(std::vector<int64_t>& words, const void* in, std::span<const size_t> sizes, int root);
  void end_scatter(const void* in, void* out, std::span<const size_t> sizes, DType dtype, int root);
  void barrier();
  // Gathers every rank's `value` as a part of the operation `kind`. `items` must agree. The values carry tags, because
  // they determine how much memory a rank allocates.
  void exchange(Kind kind, DType dtype, int root, uint64_t items, uint64_t value, std::span<uint64_t> values,
                uint64_t shape = 0);

  // A collective whose bytes another library moves, in `body`. It has a number like every other, so that a rank that
  // has left is detected. An exception of `body` fails the communicator on every rank; `body` must end when
  // has_failed() is true.
  void delegate(Call call, FunctionRef<void()> body);

  // Point to point. Messages between two ranks arrive in the order of their sends, and tags must agree. send() returns
  // when `data` may be reused.
  void send(const void* data, size_t bytes, DType dtype, int dest, int tag, bool sealed = false);
  void recv(void* data, size_t bytes, DType dtype, int source, int tag, bool sealed = false);

  // For a mailbox (messages/mailbox.h), which drives the links in place of calls: hands them over for good. Later calls
  // throw UsageError. Throws Failure if the communicator has failed.
  class LinkUser {
   public:
    virtual ~LinkUser() = default;
    // The links are about to be closed. When it returns, no thread of the user touches them any more.
    virtual void release_links() = 0;
  };
  struct TakenLinks {
    Mesh& mesh;
    BellHandle bell;  // this rank's
    WaitPolicy policy;
    bool has_sockets;
  };
  TakenLinks take_links(LinkUser& user);
  // The user has ended. No other can follow.
  void return_links();
  // Fails the communicator on every rank because of an error while the links were driven, and returns its failure.
  Failure fail_links(const std::exception_ptr& error);

  // Symmetric memory (symmetric.h). Shared, because arrays may outlive the communicator.
  const std::shared_ptr<SymmetricSegments>& symmetric() const { return symmetric_; }
  int local_rank() const { return local_rank_; }
  int leader() const { return local_ranks_.front(); }  // of this host
  int local_size() const { return static_cast<int>(local_ranks_.size()); }
  // Whether ranks of this host share cores, so that no thread should spin for long.
  bool is_crowded() const { return local_size() > cores_; }

  // Fails the communicator on every rank. Any thread, also while another is inside a collective.
  void abort(const std::string& reason);
  // Sends a goodbye and closes everything; later calls throw UsageError. First aborts a running call of another thread,
  // or of this one if a signal handler calls shutdown().
  void shutdown();
  // For a forked child: closes everything without a message, because the parent is the rank. Later calls throw
  // UsageError. Takes no lock and changes no container, because other threads may have held or changed them at the
  // fork. The destructor must not run for the same reason: the owner leaks the object.
  void abandon();
  bool has_failed() const { return failure_.failed(); }
  void check_failure() const { failure_.check(); }  // throws it

  // The sizes at which `auto` changes algorithms. All ranks must set them between the same two calls, in the thread
  // that makes the calls.
  const SwitchOver& switch_over() const { return options_.switch_over; }
  void set_switch_over(const SwitchOver& over) { options_.switch_over = over; }

  // For the engine: the failure, if there is one; the watch, which carries notes; a rank that has left and takes no
  // part in the next call.
  std::optional<Failure> failure() const {
    return failure_.failed() ? std::optional(failure_.failure()) : std::nullopt;
  }
  Watch& watch() { return *watch_; }
  std::optional<Failure> departed() const { return watch_->departed(calls_made_); }
  const std::vector<std::vector<int>>& ranks_of_host() const { return ranks_of_host_; }
  const std::vector<int>& host_of() const { return host_of_; }

  // For error messages, in the thread that made the call: its operation, and the time limit.
  std::string last_call() const { return name_of(current_.kind); }
  int64_t timeout_ns() const { return options_.timeout_ns; }

 private:
  class Turn;
  template <class Body>
  void guarded(const Call& call, Body&& body);
  template <class Body>
  void run(Call call, Body&& body);
  template <class Start>
  void send_or_receive(Watch::Direction direction, DType dtype, int tag, bool sealed, Start&& start);
  void exchange_over_links(const Call& call, uint64_t value, std::span<uint64_t> values);
  template <class Body>
  void run_first_step(const Call& call, Body&& body);
  void check_first_step();
  bool takes_carried(FunctionRef<void()> copy);
  [[noreturn]] void fail(const Failure& failure);
  void await_failure_detector(int patience_ms = 300);
  void close_now();
  void release_links();
  void check_root(int root) const;
  void on_long_wait(int64_t since_ns) override;
  void on_timeout() override;
  std::vector<int> waiting_for() const;
  std::string name_of_rank(int rank) const;

  bool is_one_host() const { return host_count() == 1; }
  int host_count() const { return static_cast<int>(ranks_of_host_.size()); }
  // Whether Adasum combines hosts instead of ranks.
  bool sums_hosts_first() const;
  bool gathers_by_rails();
  bool adasum_is_hierarchical() const { return options_.adasum_hierarchical && host_count() < size(); }
  Hierarchy hierarchy(int divisor = 0);
  int divisor_or_size(int divisor) const { return divisor > 0 ? divisor : size(); }

  int rank_;
  std::vector<std::string> hosts_;
  std::vector<int> host_of_;
  std::vector<int> local_ranks_;                 // the ranks of this host
  std::vector<std::vector<int>> ranks_of_host_;  // by host number
  int local_rank_ = 0;
  int cores_;
  Options options_;

  std::unique_ptr<Watch> watch_;  // outlives everything that may wait
  FailureState& failure_;
  std::unique_ptr<HostSegment> segment_;
  std::shared_ptr<SymmetricSegments> symmetric_;
  std::unique_ptr<Waiter> waiter_;
  std::unique_ptr<HostGroup> host_;
  std::unique_ptr<Mesh> mesh_;
  Scratch scratch_, partials_;

  std::mutex mutex_;                      // one call at a time
  std::atomic<std::thread::id> owner_{};  // the thread that holds mutex_
  std::mutex closing_;                    // excludes abort() and close_now()
  bool is_open_ = true;                   // guarded by mutex_; written under closing_ too
  bool close_after_call_ = false;
  bool are_links_taken_ = false;         // guarded by mutex_
  LinkUser* link_user_ = nullptr;        // guarded by mutex_
  std::thread::id begun_by_{};           // the thread that made the first call of two, if no other call has followed it
  std::atomic<bool> is_closing_{false};  // close_now() has begun
  std::atomic<bool> is_abandoned_{false};
  uint64_t calls_made_ = 0;
  Call current_;
  Watch::Direction current_direction_;  // of a send or receive
  bool is_long_ = false;                // the watch has announced the call to all ranks
  int64_t is_long_since_ns_ = 0;
};

}  // namespace ronde
