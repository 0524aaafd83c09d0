// The element types, reductions and operations of the data plane.
//
// Their numbers are part of the wire format between ranks and of src/ronde/types.py; never renumber them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ronde {

enum class DType : uint8_t {
  kBool = 0,
  kUint8 = 1,
  kUint16 = 2,
  kUint32 = 3,
  kUint64 = 4,
  kInt8 = 5,
  kInt16 = 6,
  kInt32 = 7,
  kInt64 = 8,
  kFloat16 = 9,
  kBfloat16 = 10,
  kFloat32 = 11,
  kFloat64 = 12,
  kComplex64 = 13,
  kComplex128 = 14,
};
inline constexpr int kDTypeCount = 15;

enum class ReduceOp : uint8_t {
  kSum = 0,
  kAverage = 1,
  kMin = 2,
  kMax = 3,
  kProduct = 4,
  kBitAnd = 5,
  kBitOr = 6,
  kBitXor = 7,
  kAdasum = 8,  // of whole vectors, not element by element; see algorithms/adasum.h
};
inline constexpr int kReduceOpCount = 9;

// The operation of a call. It is part of every call's signature, so that ranks never combine two different operations.
enum class Kind : uint8_t {
  kBarrier = 0,
  kAllreduce = 1,
  kReduce = 2,
  kReduceScatter = 3,
  kAllgather = 4,
  kBroadcast = 5,
  kGather = 6,
  kScatter = 7,
  kAlltoall = 8,
  kSendRecv = 9,
  kEmpty = 10,  // creates symmetric memory
};
inline constexpr int kKindCount = 11;

constexpr size_t size_of(DType dtype) {
  constexpr uint8_t kBytes[kDTypeCount] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16};
  return kBytes[static_cast<int>(dtype)];
}

constexpr bool reduces(Kind kind) {
  return kind == Kind::kAllreduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}

constexpr bool is_integer(DType dtype) { return dtype >= DType::kUint8 && dtype <= DType::kInt64; }

const char* name_of(DType dtype);
const char* name_of(ReduceOp op);
const char* name_of(Kind kind);

}  // namespace ronde
