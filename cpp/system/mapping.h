// Shared memory of one host, mapped from a file descriptor without a name: the kernel frees it with its last user.
#pragma once

#include <cstddef>

namespace ronde {

class Mapping {
 public:
  // Maps `bytes` bytes of `fd` for reading and writing, and closes the descriptor. Throws std::system_error.
  Mapping(int fd, size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // Gives the pages of [begin, begin + bytes) private copies at the same addresses: this process and the others that
  // map them no longer see each other's changes. Keeps the rest of the shared pages if there is no memory for a copy.
  void make_private(std::byte* begin, size_t bytes);

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace ronde
