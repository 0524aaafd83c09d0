#include "communicator/call.h"

#include "base/shape_word.h"

namespace ronde {
namespace {

// How the shapes of two otherwise equal calls differ; `on_a` and `on_b` name their ranks.
std::string describe_shapes(const Call& a, const std::string& on_a, const Call& b, const std::string& on_b) {
  const bool is_of_rows = a.kind == Kind::kAllgather || a.kind == Kind::kGather || a.kind == Kind::kAlltoall;
  const std::string what = is_of_rows ? "rows of " : "";
  const std::string first = describe_shape(a.shape), second = describe_shape(b.shape);
  if (first.empty() || second.empty()) return " (" + what + "different shapes)";
  return " (" + what + "shape " + first + on_a + ", " + second + on_b + ")";
}

}  // namespace

bool Call::is_known() const {
  return static_cast<int>(kind) < kKindCount && static_cast<int>(dtype) < kDTypeCount &&
         static_cast<int>(op) < kReduceOpCount;
}

std::string Call::describe() const {
  std::string text = name_of(kind);
  if (kind == Kind::kSendRecv) return text + " of " + name_of(dtype) + " with tag " + std::to_string(root);
  if (kind == Kind::kBarrier) return text;
  text += " of ";
  if (count > 0 || reduces(kind)) text += std::to_string(count) + " ";
  text += name_of(dtype);
  if (reduces(kind)) text += std::string(" by ") + name_of(op);
  if (root >= 0) text += " with root " + std::to_string(root);
  return text;
}

std::string describe_mismatch(int rank_a, const Call& a, int rank_b, const Call& b) {
  const std::string name_a = "rank " + std::to_string(rank_a), name_b = "rank " + std::to_string(rank_b);
  const std::string on_a = " on " + name_a, on_b = " on " + name_b;
  std::string text = name_a + " called " + a.describe() + ", but " + name_b + " called " + b.describe();
  const bool both_collective = a.kind != Kind::kSendRecv && b.kind != Kind::kSendRecv;
  if (both_collective && a.sequence != b.sequence) {
    text +=
        " (call number " + std::to_string(a.sequence) + on_a + ", number " + std::to_string(b.sequence) + on_b + ")";
  } else if (both_collective && a.algorithm != b.algorithm) {
    text += " (with different algorithms: do the ranks have different settings?)";
  } else if (a.kind == b.kind && a.shape != b.shape) {
    text += describe_shapes(a, on_a, b, on_b);
  }
  return text;
}

}  // namespace ronde
