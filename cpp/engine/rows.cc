#include "engine/rows.h"

#include "base/error.h"

namespace ronde {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 56;

[[noreturn]] void refuse(const char* what) { throw ProtocolError(0, what); }

// The bytes of a shape; refuses more than fit into memory. A length of 0 does not hide an overflow of the others.
uint64_t product(std::span<const int64_t> shape, uint64_t bytes) {
  bool is_empty = false;
  for (const int64_t length : shape) {
    if (length < 0) refuse("a shape with a negative length");
    is_empty |= length == 0;
    if (length > 0 && bytes > kMostBytes / static_cast<uint64_t>(length)) refuse("a shape larger than any memory");
    if (length > 0) bytes *= static_cast<uint64_t>(length);
  }
  return is_empty ? 0 : bytes;
}

uint64_t sum(std::span<const uint64_t> rows) {
  uint64_t total = 0;
  for (const uint64_t count : rows) {
    if (count > kMostBytes || total > kMostBytes - count) refuse("more rows than fit into any memory");
    total += count;
  }
  return total;
}

}  // namespace

void check_rows(const Signature& signature, std::span<const uint64_t> rows, int rank, int size) {
  product(signature.shape, size_of(signature.dtype));
  if (signature.kind != Kind::kAllgather && signature.kind != Kind::kAlltoall) return;
  const auto ranks = static_cast<size_t>(size), own = static_cast<size_t>(rank);
  const bool gathers = signature.kind == Kind::kAllgather;
  if (rows.size() != (gathers ? ranks : ranks * ranks)) refuse("rows of another number of ranks");
  const uint64_t total = sum(rows);
  const uint64_t row_bytes = signature.row_bytes();
  if (row_bytes > 0 && total > kMostBytes / row_bytes) refuse("more rows than fit into any memory");
  const uint64_t given = gathers ? rows[own] : sum(rows.subspan(own * ranks, ranks));
  if (given > signature.rows()) refuse("more rows than the tensor of this rank has");
}

}  // namespace ronde
