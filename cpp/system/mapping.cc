#include "system/mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace ronde {
namespace {

[[noreturn]] void fail(int fd, int error, const char* what) {
  close(fd);
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

Mapping::Mapping(int fd, size_t bytes) : bytes_(bytes) {
  // An access behind the end of the file would kill the process (SIGBUS), so check the size first.
  struct stat status{};
  if (fstat(fd, &status) != 0) fail(fd, errno, "fstat of a shared-memory segment");
  if (static_cast<size_t>(status.st_size) < bytes) fail(fd, EINVAL, "a shared-memory segment is shorter than agreed");
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) fail(fd, errno, "mmap of a shared-memory segment");
  close(fd);
  madvise(address, bytes, MADV_HUGEPAGE);  // optional: most systems disable huge pages of shared memory
  data_ = static_cast<std::byte*>(address);
}

// Each piece is copied first and then takes its place in one step, so that the addresses are valid at any time.
void Mapping::make_private(std::byte* begin, size_t bytes) {
  constexpr size_t kPieceBytes = size_t{16} << 20;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t first = static_cast<size_t>(begin - data_) / page * page;
  const size_t end = std::min((static_cast<size_t>(begin - data_) + bytes + page - 1) / page * page, bytes_);
  for (size_t at = first; at < end; at += kPieceBytes) {
    const size_t piece = std::min(kPieceBytes, end - at);
    void* const copy = mmap(nullptr, piece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) return;
    std::memcpy(copy, data_ + at, piece);
    if (mremap(copy, piece, piece, MREMAP_MAYMOVE | MREMAP_FIXED, data_ + at) == MAP_FAILED) {
      munmap(copy, piece);
      return;
    }
  }
}

Mapping::~Mapping() { munmap(data_, bytes_); }

}  // namespace ronde
