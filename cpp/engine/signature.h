// The signature of a named tensor: the part of a request that must not change for a cached response to apply.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "base/types.h"

namespace ronde {

struct TensorType {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  bool operator==(const TensorType&) const = default;
};

struct Signature {
  Kind kind = Kind::kAllreduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;  // of allreduce and reducescatter
  int root = -1;                 // of broadcast
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<int64_t> shape;    // of this rank's input
  std::vector<int64_t> splits;   // of alltoall: rows for each rank
  std::string device = "cpu";    // the device of the program's tensor
  std::vector<TensorType> more;  // the other tensors of a group

  bool operator==(const Signature&) const = default;

  // Whether the memory lies on the device. Only a backend for that device may access it.
  bool is_on_device() const { return device.ends_with(" memory"); }

  size_t rows() const { return shape.empty() ? 1 : static_cast<size_t>(shape.front()); }
  size_t row_items() const {
    if (shape.empty()) return 1;
    return std::accumulate(shape.begin() + 1, shape.end(), size_t{1}, std::multiplies<>());
  }
  size_t count() const { return rows() * row_items(); }
  size_t row_bytes() const { return row_items() * size_of(dtype); }
  size_t bytes() const { return count() * size_of(dtype); }

  // One signature per tensor of the group, or the single one. This object's fields describe the first tensor.
  std::vector<Signature> tensors() const {
    std::vector<Signature> all{*this};
    all.front().more.clear();
    for (const TensorType& type : more) {
      all.push_back(all.front());
      all.back().dtype = type.dtype;
      all.back().shape = type.shape;
    }
    return all;
  }
};

}  // namespace ronde
