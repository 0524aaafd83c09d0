// Shared memory of one host, mapped from a file descriptor that has no name anywhere: it vanishes with its last user.
#pragma once

#include <cstddef>

namespace ronde {

class Mapping {
 public:
  // Maps all of `fd` (`bytes` long) for reading and writing, and closes it. Throws std::system_error.
  Mapping(int fd, size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace ronde
