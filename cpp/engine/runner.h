// Executes the decided tensors: fuses them and runs the collectives.
//
// The batch and the cached signatures alone determine how a batch is divided into collectives, so all ranks divide it
// alike, also those that contribute nothing. The tensors of a bundle have the same operation, type and factors
// (all-gathers need nothing in common). A tensor that does not fit into a bundle is skipped and goes into a later one.
// Fused tensors pass through one buffer in symmetric memory. Adasum gets the length of each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "communicator/communicator.h"
#include "engine/backend.h"
#include "engine/recorder.h"
#include "engine/signature.h"

namespace ronde {

struct Work {
  const Signature* signature = nullptr;
  const std::vector<uint64_t>* rows = nullptr;  // of an allgather by rank, of an alltoall [source][destination]
  const void* in = nullptr;
  void* out = nullptr;
  uint32_t slot = 0;
  int contributors = 0;    // the divisor of an average
  bool is_absent = false;  // this rank has no such tensor and contributes neutral elements
  bool is_grouped = false;
};

class Runner {
 public:
  // `buffer`: `buffer_bytes` of symmetric memory. `keeps_groups_apart`: never fuses tensors of a group (of one slot)
  // with others.
  Runner(Communicator& communicator, Recorder& recorder, std::byte* buffer, size_t buffer_bytes,
         bool keeps_groups_apart);

  Backends& backends() { return backends_; }

  // Runs the whole batch; calls `done` for each completed work. Throws the communicator's errors.
  void run(std::span<const Work> batch, const std::function<void(const Work&)>& done);
  // A bundle has at most `fusion_bytes` (and at most the buffer's size); a tensor larger than `largest_bytes` runs
  // alone. All ranks must make this call between the same two batches.
  void set_fusion(size_t fusion_bytes, size_t largest_bytes);
  size_t fusion_bytes() const { return fusion_bytes_; }
  size_t largest_fused_bytes() const { return largest_fused_; }
  // Frees the memory that held neutral elements.
  void free_neutral();

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
  void load_input(const Work& work, std::byte* place);
  void store_result(const Work& work, const std::byte* result, size_t count);

  Communicator& communicator_;
  Backends backends_;
  Recorder& recorder_;
  std::byte* buffer_;
  size_t buffer_bytes_, fusion_bytes_;
  bool keeps_groups_apart_;
  size_t largest_fused_;  // bytes of one tensor, at most
  std::vector<std::byte> scratch_, absent_;
  std::vector<const Work*> left_, bundle_, rest_;
  std::vector<size_t> counts_;  // elements of the fused tensors, padded
};

}  // namespace ronde
