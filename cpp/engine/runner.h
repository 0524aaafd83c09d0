// Executes what all ranks have agreed on: fuses tensors and runs the collectives.
//
// How a batch is cut into collectives follows from the batch and the cached signatures alone, so it is the same on all
// ranks, also on those that contribute nothing. What is fused shares operation, type and factors (all-gathers need to
// share nothing); tensors that do not fit any more are looked past, and come with the next bundle. Fused tensors pass
// through one buffer in symmetric memory. Adasum knows where each of them begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "communicator.h"
#include "engine/backend.h"
#include "engine/recorder.h"
#include "engine/signature.h"

namespace ronde {

struct Work {
  const Signature* signature = nullptr;
  const std::vector<uint64_t>* rows = nullptr;  // allgather: rows of every rank; alltoall: [source][destination]
  const void* in = nullptr;
  void* out = nullptr;
  uint32_t slot = 0;
  int contributors = 0;    // by which an average is divided
  bool is_absent = false;  // this rank has no such tensor, and contributes neutral elements
  bool is_grouped = false;
};

class Runner {
 public:
  // `buffer`: `buffer_bytes` of symmetric memory. `keeps_groups_apart`: tensors of a group (with the same slot) are
  // fused with nothing else.
  Runner(Communicator& communicator, Recorder& recorder, std::byte* buffer, size_t buffer_bytes,
         bool keeps_groups_apart);

  Backends& backends() { return backends_; }

  // Runs all of it; calls `done` for each work that is complete. Throws what the communicator throws.
  void run(std::span<const Work> batch, const std::function<void(const Work&)>& done);
  // A bundle takes up at most so many bytes (and no more than the buffer has); a tensor that is larger than
  // `largest_bytes` runs alone. Alike on all ranks, at the same place of what they run.
  void set_fusion(size_t fusion_bytes, size_t largest_bytes);
  size_t fusion_bytes() const { return fusion_bytes_; }
  size_t largest_fused_bytes() const { return largest_fused_; }
  // Gives back the memory that was needed to contribute nothing.
  void forget();

 private:
  using Bundle = std::span<const Work* const>;
  void run_one(const Work& work);
  void run_fused(Bundle bundle);
  size_t buffered_bytes(const Work& work) const;
  bool passes_through_buffer(const Signature& signature) const;
  bool fits_into(size_t bytes, const Work& first, const Work& other);
  bool may_fuse(const Work& a, const Work& b);
  void allreduce(const Work& work);
  void allreduce_fused(Bundle bundle);
  void reduce_scatter(const Work& work);
  void reduce_scatter_fused(Bundle bundle);
  void allgather(const Work& work);
  void allgather_fused(Bundle bundle);
  void alltoall(const Work& work);
  void broadcast(const Work& work);
  size_t rows_of(const Work& work, int rank) const;
  void put_in(const Work& work, std::byte* place);
  void take_out(const Work& work, const std::byte* result, size_t count);

  Communicator& communicator_;
  Backends backends_;
  Recorder& recorder_;
  std::byte* buffer_;
  size_t buffer_bytes_, fusion_bytes_;
  bool keeps_groups_apart_;
  size_t largest_fused_;  // bytes of one tensor
  std::vector<std::byte> scratch_, absent_;
  std::vector<const Work*> left_, bundle_, rest_;
  std::vector<size_t> counts_;  // elements of the fused tensors, padded
};

}  // namespace ronde
