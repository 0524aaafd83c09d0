#include "base/types.h"

namespace ronde {

const char* name_of(DType dtype) {
  constexpr const char* kNames[kDTypeCount] = {"bool",     "uint8",   "uint16",  "uint32",    "uint64",
                                               "int8",     "int16",   "int32",   "int64",     "float16",
                                               "bfloat16", "float32", "float64", "complex64", "complex128"};
  const int index = static_cast<int>(dtype);
  return index < kDTypeCount ? kNames[index] : "unknown dtype";
}

const char* name_of(ReduceOp op) {
  constexpr const char* kNames[kReduceOpCount] = {"sum",     "average", "min",     "max",   "product",
                                                  "bit-and", "bit-or",  "bit-xor", "adasum"};
  const int index = static_cast<int>(op);
  return index < kReduceOpCount ? kNames[index] : "unknown reduction";
}

const char* name_of(Kind kind) {
  constexpr const char* kNames[kKindCount] = {"barrier",   "allreduce", "reduce", "reducescatter",
                                              "allgather", "broadcast", "gather", "scatter",
                                              "alltoall",  "send/recv", "empty"};
  const int index = static_cast<int>(kind);
  return index < kKindCount ? kNames[index] : "unknown operation";
}

}  // namespace ronde
