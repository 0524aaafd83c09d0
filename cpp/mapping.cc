#include "mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
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

Mapping::~Mapping() { munmap(data_, bytes_); }

}  // namespace ronde
