#include "communicator/communicator.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <numeric>
#include <thread>
#include <utility>

#include "algorithms/adasum.h"
#include "algorithms/hierarchical.h"
#include "algorithms/partial_sums.h"
#include "base/shape_word.h"
#include "communicator/run_call.h"
#include "kernels/reduce.h"
#include "links/shm_link.h"
#include "links/tcp_link.h"

namespace ronde {
namespace {

// A brief spin catches a peer that is about to arrive. Then sched_yield() lets a peer that shares this core run, and
// the wait goes on. Peers share a core even if there is one per rank, whenever other programs keep the other cores
// busy: longer spinning would delay the very rank that it waits for. With fewer cores than ranks they always do.
WaitPolicy policy_for(const Options& options, bool is_crowded) {
  constexpr int kLooksPerMicrosecond = 25;
  WaitPolicy policy;
  policy.timeout_ns = options.timeout_ns;
  // With a core per rank, a thread that shares this core is likely the one that the peer needs (an engine's, woken a
  // moment ago), and the kernel runs it at once only if this thread sleeps: so yield only briefly.
  if (!is_crowded) policy.yields = 24;
  if (options.spin_us >= 0) {
    policy.spins = options.spin_us * kLooksPerMicrosecond;
  } else if (is_crowded) {
    policy.spins = 4;
  }
  return policy;
}

void check_reduction(DType dtype, ReduceOp op) {
  if (op == ReduceOp::kAdasum) throw UsageError("adasum combines whole vectors: only allreduce has it");
  if (!is_supported(dtype, op)) {
    throw UsageError(std::string("there is no ") + name_of(op) + " of " + name_of(dtype) + " values");
  }
}

}  // namespace

Communicator::Communicator(Wiring wiring, const Options& options)
    : rank_(wiring.rank),
      hosts_(std::move(wiring.hosts)),
      host_of_(std::move(wiring.host_of)),
      cores_(wiring.cores),
      options_(options),
      watch_(std::move(wiring.watch)),
      failure_(watch_->failure()),
      symmetric_(wiring.symmetric ? std::move(wiring.symmetric) : std::make_shared<SymmetricSegments>()) {
  ranks_of_host_.resize(static_cast<size_t>(*std::max_element(host_of_.begin(), host_of_.end())) + 1);
  for (int rank = 0; rank < size(); ++rank) ranks_of_host_[host_of_[rank]].push_back(rank);
  local_ranks_ = ranks_of_host_[host_of_[rank_]];
  local_rank_ = static_cast<int>(std::find(local_ranks_.begin(), local_ranks_.end(), rank_) - local_ranks_.begin());

  segment_ = std::make_unique<HostSegment>(std::move(wiring.segment), local_size(), options.staging_bytes);
  std::vector<BellHandle> bell_handles;
  for (int local = 0; local < local_size(); ++local) {
    // Without sockets no rank polls, and a bell needs no eventfd.
    const Descriptor* eventfd = is_one_host() ? nullptr : watch_->eventfd_of(local_ranks_[local]);
    bell_handles.emplace_back(&segment_->slot(local).bell, eventfd);
  }
  const BellHandle own = bell_handles[local_rank_];
  waiter_ = std::make_unique<Waiter>(own, failure_, policy_for(options, is_crowded()));
  waiter_->set_listener(this);

  std::vector<std::unique_ptr<Link>> links(hosts_.size());
  for (int rank = 0; rank < size(); ++rank) {
    const auto local = std::find(local_ranks_.begin(), local_ranks_.end(), rank);
    if (rank == rank_) continue;
    if (local == local_ranks_.end()) {
      links[rank] =
          std::make_unique<TcpLink>(rank, rank_, hosts_[rank], std::move(wiring.data[rank]), options.seals_payload);
      continue;
    }
    const int index = static_cast<int>(local - local_ranks_.begin());
    links[rank] = std::make_unique<ShmLink>(rank, rank_, hosts_[rank], segment_->pipe(local_rank_, index),
                                            segment_->pipe(index, local_rank_), bell_handles[index]);
  }
  mesh_ = std::make_unique<Mesh>(rank_, std::move(links), *waiter_, !is_one_host());
  host_ = std::make_unique<HostGroup>(*segment_, *symmetric_, local_ranks_, local_rank_, bell_handles, *waiter_);
  watch_->set_bell(own);
}

Communicator::~Communicator() {
  release_links();
  close_now();
}

std::string Communicator::name_of_rank(int rank) const {
  return "rank " + std::to_string(rank) + " on " + hosts_[rank];
}

std::vector<int> Communicator::waiting_for() const {
  // While it waits for its host, messages to and from other hosts may be under way.
  std::vector<int> ranks = host_->missing();
  return ranks.empty() ? mesh_->waiting_for() : ranks;
}

void Communicator::on_long_wait(int64_t since_ns) {
  Call call = current_;
  if (call.kind == Kind::kSendRecv) call.sequence = calls_made_;
  if (!is_long_) is_long_since_ns_ = since_ns;
  is_long_ = true;
  const std::string* posted_at = waiter_->terms().posted_at;
  watch_->announce_long_call(call, current_direction_, is_long_since_ns_, posted_at != nullptr ? *posted_at : "");
}

void Communicator::on_timeout() {
  std::string text =
      "timed out: waited " + std::to_string(waiter_->timeout_ns() / 1'000'000) + " ms in " + current_.describe();
  std::vector<int> missing = waiting_for();
  const char* separator = " for ";
  for (int rank : missing) text += std::exchange(separator, ", ") + name_of_rank(rank);
  text += "; its timeout is over";
  throw Failure(FailureKind::kTimeout, -1, text, std::move(missing));
}

// Waits a moment for the failure detector. An end of file on a link means that a peer has gone, but perhaps only
// because it learned of a failure before this rank; then that failure arrives soon.
void Communicator::await_failure_detector(int patience_ms) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(patience_ms);
  while (!failure_.failed() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Communicator::fail(const Failure& failure) {
  if (failure.kind == FailureKind::kPeerLost) await_failure_detector();
  if (failure_.set(failure)) watch_->announce_failure(failure);
  throw failure_.failure();
}

Hierarchy Communicator::hierarchy(int divisor) {
  return {*host_,   *mesh_,    ranks_of_host_,           host_of_[rank_],
          scratch_, partials_, divisor_or_size(divisor), options_.switch_over};
}

bool Communicator::sums_hosts_first() const {
  const bool is_allowed = options_.allreduce == Algorithm::kAuto || options_.allreduce == Algorithm::kHierarchical;
  return is_allowed && local_size() > 1;
}

bool Communicator::gathers_by_rails() {
  return options_.hierarchical_allgather && local_size() > 1 && is_homogeneous(hierarchy());
}

void Communicator::check_root(int root) const {
  if (root < 0 || root >= size()) {
    throw UsageError("root " + std::to_string(root) + " is not a rank of this communicator, which has ranks 0 to " +
                     std::to_string(size() - 1));
  }
}

void Communicator::allreduce(const void* in, void* out, size_t count, DType dtype, ReduceOp op, int divisor,
                             uint64_t shape) {
  if (op == ReduceOp::kAdasum) return adasum(in, out, std::span(&count, 1), dtype, shape);
  check_reduction(dtype, op);
  Call call = make_call(Kind::kAllreduce, dtype, count, -1, op, shape);
  const Algorithm algorithm = select_allreduce(options_.allreduce, options_.switch_over, count * size_of(dtype), dtype,
                                               op, size(), host_count());
  call.algorithm = static_cast<uint8_t>(algorithm);
  const Reduction reduction{dtype, op, divisor_or_size(divisor)};
  run(call, [&](const Call& call) {
    switch (algorithm) {
      case Algorithm::kAuto:
      case Algorithm::kInHost:
        return host_->allreduce(call, reduction, in, out, count);
      case Algorithm::kHierarchical: {
        Hierarchy hierarchy = this->hierarchy(divisor);
        return hierarchical_allreduce(hierarchy, call, in, out);
      }
      case Algorithm::kDirect:
        return allreduce_direct(*mesh_, call, in, out, reduction, scratch_);
      case Algorithm::kRing:
        return with_partial_sums(reduction, in, out, count, partials_, [&](const Reduction& wide, auto from, auto to) {
          allreduce_ring(*mesh_, call, from, to, wide, scratch_);
        });
      case Algorithm::kDoubling:
        return with_partial_sums(reduction, in, out, count, partials_, [&](const Reduction& wide, auto from, auto to) {
          allreduce_doubling(*mesh_, call, from, to, wide, scratch_);
        });
      case Algorithm::kAdasum:
      case Algorithm::kHierarchicalAdasum:
      case Algorithm::kElsewhere:
        break;  // never selected
    }
  });
}

void Communicator::check_adasum(DType dtype) const {
  if (!has_dot_products(dtype)) {
    throw UsageError(std::string("there is no adasum of ") + name_of(dtype) +
                     " values: it needs float16, bfloat16, float32 or float64");
  }
  const bool of_hosts = adasum_is_hierarchical();
  const auto parties = static_cast<unsigned>(of_hosts ? host_count() : size());
  if (std::has_single_bit(parties)) return;
  throw UsageError(std::string("adasum combines ") + (of_hosts ? "hosts" : "ranks") +
                   " in pairs, and pairs in pairs, so there must be 2, 4, 8 or another power of two of them, not " +
                   std::to_string(parties) + " as here; any number can take the average");
}

void Communicator::adasum(const void* in, void* out, std::span<const size_t> counts, DType dtype, uint64_t shape) {
  check_adasum(dtype);
  const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
  Call call = make_call(Kind::kAllreduce, dtype, total, -1, ReduceOp::kAdasum, shape);
  const bool of_hosts = adasum_is_hierarchical();
  const Algorithm across = of_hosts ? Algorithm::kHierarchicalAdasum : Algorithm::kAdasum;
  call.algorithm = static_cast<uint8_t>(is_one_host() ? Algorithm::kInHost : across);
  run(call, [&](const Call& call) {
    if (is_one_host() && of_hosts) {
      return host_->allreduce(call, Reduction{dtype, ReduceOp::kAverage, size()}, in, out, total);
    }
    if (is_one_host()) return adasum_in_host(*host_, call, in, out, counts, scratch_);
    if (!of_hosts) return ronde::adasum(*mesh_, call, in, out, counts, scratch_);
    Hierarchy hierarchy = this->hierarchy();
    hierarchical_adasum(hierarchy, call, in, out, counts);
  });
}

void Communicator::reduce(const void* in, void* out, size_t count, DType dtype, ReduceOp op, int root, uint64_t shape) {
  check_reduction(dtype, op);
  check_root(root);
  const Reduction reduction{dtype, op, size()};
  run(make_call(Kind::kReduce, dtype, count, root, op, shape), [&](const Call& call) {
    if (is_one_host()) return host_->reduce(call, reduction, in, out, count, root);
    if (host_count() == size() || needs_all_at_once(dtype, op)) {
      return reduce_to_root(*mesh_, call, in, out, root, reduction, scratch_);
    }
    Hierarchy hierarchy = this->hierarchy();
    hierarchical_reduce(hierarchy, call, in, out);
  });
}

void Communicator::reduce_scatter(const void* in, void* out, std::span<const size_t> counts, DType dtype, ReduceOp op,
                                  int divisor, uint64_t shape) {
  check_reduction(dtype, op);
  const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
  const Reduction reduction{dtype, op, divisor_or_size(divisor)};
  const Call call = make_call(Kind::kReduceScatter, dtype, total, -1, op, shape > 0 ? shape : word_of_counts(counts));
  run(call, [&](const Call& call) {
    if (is_one_host()) return host_->reduce_scatter(call, reduction, in, counts, out);
    Hierarchy hierarchy = this->hierarchy(divisor);
    if (sums_hosts_first() && is_homogeneous(hierarchy) && !needs_all_at_once(dtype, op)) {
      return hierarchical_reduce_scatter(hierarchy, call, in, counts, out);
    }
    reduce_scatterv(*mesh_, call, in, counts, out, reduction, scratch_);
  });
}

void Communicator::allgather(const void* in, void* out, std::span<const size_t> sizes, DType dtype) {
  run(make_call(Kind::kAllgather, dtype), [&](const Call& call) {
    if (is_one_host()) return host_->share(call, in, out, {sizes, running_offsets(sizes)});
    if (gathers_by_rails()) {
      Hierarchy hierarchy = this->hierarchy();
      return hierarchical_allgather(hierarchy, call, in, out, sizes);
    }
    allgatherv(*mesh_, call, in, out, sizes);
  });
}

void Communicator::broadcast(void* data, size_t count, DType dtype, int root, Kind kind, uint64_t shape, bool sealed) {
  check_root(root);
  run(with_tags(make_call(kind, dtype, count, root, ReduceOp::kSum, shape), sealed), [&](const Call& call) {
    Hierarchy hierarchy = this->hierarchy();
    hierarchical_broadcast(hierarchy, call, data);
  });
}

void Communicator::exchange(Kind kind, DType dtype, int root, uint64_t items, uint64_t value,
                            std::span<uint64_t> values, uint64_t shape) {
  run(with_tags(make_call(kind, dtype, items, root, ReduceOp::kSum, shape), true), [&](const Call& call) {
    if (is_one_host()) return host_->exchange(call, value, values);
    exchange_over_links(call, value, values);
  });
}

void Communicator::exchange_over_links(const Call& call, uint64_t value, std::span<uint64_t> values) {
  const std::vector<size_t> sizes(hosts_.size(), sizeof(value));
  allgatherv(*mesh_, call, &value, values.data(), sizes);
}

void Communicator::gather(const void* in, void* out, std::span<const size_t> sizes, DType dtype, int root) {
  check_root(root);
  run(make_call(Kind::kGather, dtype, 0, root), [&](const Call& call) {
    if (is_one_host()) return host_->share(call, in, out, {sizes, running_offsets(sizes)}, root);
    gatherv(*mesh_, call, in, out, sizes, root);
  });
}

void Communicator::scatter(const void* in, void* out, std::span<const size_t> sizes, DType dtype, int root) {
  check_root(root);
  run(make_call(Kind::kScatter, dtype, 0, root), [&](const Call& call) {
    if (!is_one_host()) return scatterv(*mesh_, call, in, out, sizes, root);
    const std::vector<size_t> nothing(sizes.size());
    std::vector<size_t> arriving(sizes.size());
    arriving[root] = sizes[rank_];
    const std::vector<size_t> offsets = running_offsets(sizes);
    host_->deal(call, in, {rank_ == root ? sizes : nothing, offsets}, out, {arriving, nothing});
  });
}

void Communicator::alltoall(const void* in, std::span<const size_t> in_sizes, void* out,
                            std::span<const size_t> out_sizes, DType dtype, uint64_t shape, bool sealed) {
  run(with_tags(make_call(Kind::kAlltoall, dtype, 0, -1, ReduceOp::kSum, shape), sealed), [&](const Call& call) {
    if (!is_one_host()) return alltoallv(*mesh_, call, in, in_sizes, out, out_sizes);
    host_->deal(call, in, {in_sizes, running_offsets(in_sizes)}, out, {out_sizes, running_offsets(out_sizes)});
  });
}

void Communicator::barrier() {
  run(make_call(Kind::kBarrier, DType::kUint8), [&](const Call& call) {
    if (is_one_host()) return host_->announce(call);
    Hierarchy hierarchy = this->hierarchy();
    hierarchical_barrier(hierarchy, call);
  });
}

void Communicator::delegate(Call call, FunctionRef<void()> body) {
  const Turn turn(*this);
  call.sequence = calls_made_++;
  call.algorithm = static_cast<uint8_t>(Algorithm::kElsewhere);
  current_direction_ = {};
  begun_by_ = {};
  guarded(call, [&](const Call& call) {
    watch_->begin_call(call.sequence);
    try {
      body();
    } catch (const Failure&) {
      throw;
    } catch (const Interrupted&) {
      throw;
    } catch (const std::exception& error) {
      await_failure_detector(2000);  // the library may notice the end of a rank before the failure detector does
      failure_.check();
      const std::string what = " aborted: failed in " + call.describe() + ": " + error.what();
      throw Failure(FailureKind::kAborted, rank_, name_of_rank(rank_) + what);
    }
  });
}

void Communicator::send(const void* data, size_t bytes, DType dtype, int dest, int tag, bool sealed) {
  send_or_receive({dest, true}, dtype, tag, sealed, [&](Link& link, const Call& call) {
    const Ticket ticket = link.send(call, data, bytes);
    return [&link, ticket] { return link.sent() >= ticket; };
  });
}

void Communicator::recv(void* data, size_t bytes, DType dtype, int source, int tag, bool sealed) {
  send_or_receive({source, false}, dtype, tag, sealed, [&](Link& link, const Call& call) {
    const Ticket ticket = link.recv(call, data, bytes);
    return [&link, ticket] { return link.received() >= ticket; };
  });
}

// Sends or receives one message: `start` queues it and returns a function that tells whether it is done.
template <class Start>
void Communicator::send_or_receive(Watch::Direction direction, DType dtype, int tag, bool sealed, Start&& start) {
  const int peer = direction.peer;
  if (peer < 0 || peer >= size() || peer == rank_) {
    throw UsageError("cannot send to or receive from rank " + std::to_string(peer) + ": rank " + std::to_string(rank_) +
                     " has the other ranks of 0 to " + std::to_string(size() - 1) + " as peers");
  }
  const Turn turn(*this);
  current_direction_ = direction;
  guarded(with_tags(make_call(Kind::kSendRecv, dtype, 0, tag), sealed), [&](const Call& call) {
    failure_.check();
    Link& link = mesh_->link(peer);
    const auto is_done = start(link, call);
    mesh_->wait_until([&] {
      if (is_done()) return true;
      if (!watch_->has_left(peer)) return false;
      // The peer may have sent this message before it left.
      if (!direction.sends && link.has_end_of_file()) return false;
      link.progress();
      if (is_done()) return true;
      throw Failure(FailureKind::kPeerLost, peer, name_of_rank(peer) + " has shut down");
    });
    watch_->count_message(direction);
  });
}

void Communicator::abort(const std::string& reason) {
  if (is_abandoned_.load()) return;
  const Failure failure(FailureKind::kAborted, rank_, name_of_rank(rank_) + " aborted: " + reason);
  std::lock_guard lock(closing_);
  if (is_open_ && failure_.set(failure)) watch_->announce_failure(failure);
}

void Communicator::shutdown() {
  if (is_abandoned_.load()) return;
  if (owner_.load() == std::this_thread::get_id()) {
    close_after_call_ = true;
    return abort("shut down by a signal handler in the middle of a call");
  }
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    abort("shut down while a call was running");
    lock.lock();
  }
  release_links();
  close_now();
}

// Only at the end of the communicator, with mutex_ or in the destructor.
void Communicator::release_links() {
  if (link_user_ != nullptr) link_user_->release_links();
  link_user_ = nullptr;
}

Communicator::TakenLinks Communicator::take_links(LinkUser& user) {
  const Turn turn(*this);
  failure_.check();
  are_links_taken_ = true;
  link_user_ = &user;
  return {*mesh_, waiter_->own(), waiter_->policy(), !is_one_host()};
}

void Communicator::return_links() {
  std::lock_guard lock(mutex_);
  link_user_ = nullptr;
}

Failure Communicator::fail_links(const std::exception_ptr& error) {
  try {
    try {
      std::rethrow_exception(error);
    } catch (const MismatchError& mismatch) {
      fail(Failure(FailureKind::kMismatch, -1, mismatch.what()));
    } catch (const Failure& failure) {
      fail(failure);
    } catch (const ProtocolError& violation) {
      watch_->distrust(violation);
    } catch (const std::exception& other) {
      abort(std::string("failed between calls: ") + other.what());
    }
  } catch (const Failure&) {
    // what fail() throws
  }
  return failure_.failed() ? failure_.failure()
                           : Failure(FailureKind::kAborted, rank_, "this communicator has been shut down");
}

void Communicator::close_now() {
  std::lock_guard lock(closing_);
  if (!is_open_) return;
  is_open_ = false;
  // The failure may have come from a peer a moment ago. A rank that does not know it yet must not take this rank's
  // goodbye for the cause.
  if (failure_.failed()) watch_->announce_failure(failure_.failure());
  watch_->send_goodbye(calls_made_);
  is_closing_.store(true);
  watch_->stop();
  mesh_.reset();
  host_.reset();
  waiter_.reset();
  segment_.reset();
}

void Communicator::abandon() {
  if (is_abandoned_.exchange(true) || is_closing_.load()) return;  // the parent had begun to close it before the fork
  watch_->abandon();
  mesh_->abandon();
  waiter_->abandon();
}

}  // namespace ronde
