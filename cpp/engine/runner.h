// Executes what all ranks have agreed on: fuses tensors and runs the collectives.
//
// How a batch is cut into collectives follows from the batch and the cached signatures alone, so it is the same on all
// ranks. What is fused shares operation, type and factors; tensors that do not fit any more are looked past, and come
// with the next group. Fused tensors pass through one buffer in symmetric memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "communicator.h"
#include "engine/recorder.h"
#include "engine/signature.h"

namespace ronde {

struct Work {
  const Signature* signature = nullptr;
  const std::vector<uint64_t>* rows = nullptr;  // allgather: rows of every rank; alltoall: [source][destination]
  const void* in = nullptr;
  void* out = nullptr;
  uint32_t slot = 0;
};

class Runner {
 public:
  // `buffer`: `buffer_bytes` of symmetric memory.
  Runner(Communicator& communicator, Recorder& recorder, std::byte* buffer, size_t buffer_bytes);

  // Runs all of it; calls `done` for each work that is complete. Throws what the communicator throws.
  void run(std::span<const Work> batch, const std::function<void(const Work&)>& done);
  void run_one(const Work& work);

 private:
  bool fits_into(size_t bytes, const Signature& first, const Signature& other) const;
  void allreduce(const Work& work);
  void allreduce_fused(std::span<const Work* const> group);
  void reduce_scatter(const Work& work);
  void allgather(const Work& work);
  void alltoall(const Work& work);
  void broadcast(const Work& work);
  const void* prescaled(const Work& work, void* into);
  void finish(const Signature& signature, void* out, size_t count);

  Communicator& communicator_;
  Recorder& recorder_;
  std::byte* buffer_;
  size_t buffer_bytes_;
  size_t largest_fused_;  // bytes of one tensor
  std::vector<std::byte> scratch_;
  std::vector<const Work*> left_, group_, rest_;
};

}  // namespace ronde
