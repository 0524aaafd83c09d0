// How a communicator makes one call: it waits for its turn, numbers the call, compares it on this host, and announces a
// failure to all ranks. For the files that define the communicator's operations.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <numeric>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "communicator/communicator.h"

namespace ronde {

inline std::vector<size_t> running_offsets(std::span<const size_t> sizes) {
  std::vector<size_t> offsets(sizes.size());
  std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), size_t{0});
  return offsets;
}

inline Call make_call(Kind kind, DType dtype, uint64_t count = 0, int root = -1, ReduceOp op = ReduceOp::kSum,
                      uint64_t shape = 0) {
  return {.count = count, .shape = shape, .root = root, .kind = kind, .dtype = dtype, .op = op};
}

inline Call with_tags(Call call, bool sealed) {
  call.is_sealed = sealed;
  return call;
}

// Holds the communicator for one call of one thread.
class Communicator::Turn {
 public:
  explicit Turn(Communicator& communicator) : communicator_(communicator) {
    if (communicator_.is_abandoned_.load()) {
      throw UsageError("this communicator belongs to the parent of this forked process");
    }
    if (communicator_.owner_.load() == std::this_thread::get_id()) {
      throw UsageError("this communicator is in the middle of a call, which a signal handler has interrupted");
    }
    lock_ = std::unique_lock(communicator_.mutex_);
    if (!communicator_.is_open_) throw UsageError("this communicator has been shut down");
    if (communicator_.are_links_taken_) {
      throw UsageError("this communicator carries the messages of a mailbox and takes no calls: use a duplicate");
    }
    communicator_.owner_.store(std::this_thread::get_id());
    communicator_.waiter_->set_terms(WithCallTerms::current());
  }
  ~Turn() {
    communicator_.owner_.store({});
    if (std::exchange(communicator_.is_long_, false)) [[unlikely]] {
      communicator_.watch_->end_long_call();
    }
    if (communicator_.close_after_call_) communicator_.close_now();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Communicator& communicator_;
  std::unique_lock<std::mutex> lock_;
};

// Runs one call and announces its failure to all ranks. The arguments have been checked before.
template <class Body>
void Communicator::guarded(const Call& call, Body&& body) {
  current_ = call;
  try {
    try {
      body(call);
    } catch (const MismatchError& error) {
      if (call.algorithm == static_cast<uint8_t>(Algorithm::kInHost)) throw;  // all ranks throw it
      fail(Failure(FailureKind::kMismatch, -1, error.what()));
    } catch (const Interrupted&) {
      abort("interrupted by a signal");
      throw;
    } catch (const Failure& failure) {
      fail(failure);
    } catch (const ProtocolError& error) {
      watch_->distrust(error);
      throw failure_.failure();
    } catch (const std::exception& error) {
      abort("failed in " + call.describe() + ": " + error.what());
      throw;
    }
  } catch (...) {
    // The others know of the failure by now. The caller may change its arrays from here on.
    if (failure_.failed()) {
      host_->leave();
      host_->take_back_output([this](int rank) { return watch_->has_gone(rank); });
    }
    throw;
  }
}

// Runs one collective call: numbers it, and first compares it with the calls of the other ranks on this host.
template <class Body>
void Communicator::run(Call call, Body&& body) {
  const Turn turn(*this);
  call.sequence = calls_made_++;
  current_direction_ = {};
  begun_by_ = {};
  if (call.kind != Kind::kAllreduce && is_one_host()) call.algorithm = static_cast<uint8_t>(Algorithm::kInHost);
  guarded(call, [&](const Call& call) {
    watch_->begin_call(call.sequence);
    // An in-host algorithm announces the call itself. For the others the announcement finds mismatches that would make
    // ranks wait for each other on different channels.
    const bool announces = call.algorithm == static_cast<uint8_t>(Algorithm::kInHost);
    if (!announces && local_size() > 1) host_->announce(call);
    body(call);
  });
}

}  // namespace ronde
