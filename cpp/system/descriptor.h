// A file descriptor that closes itself when it goes out of scope.
//
// A program may close all descriptors of its process, and open files that get the same numbers. So a descriptor
// remembers its file, and leaves any other file alone. The kernel tells the files of eventfd(2) and epoll(7) apart from
// all others, but not from each other.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <utility>

namespace ronde {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {
    struct stat status{};
    if (fd >= 0 && fstat(fd, &status) == 0) file_ = {status.st_dev, status.st_ino};
  }
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)), file_(other.file_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
      file_ = other.file_;
    }
    return *this;
  }

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  // False if the program has closed it, even if another file has its number now.
  bool is_open() const {
    struct stat status{};
    return fd_ >= 0 && fstat(fd_, &status) == 0 && status.st_dev == file_.device && status.st_ino == file_.inode;
  }
  void reset() {
    if (is_open()) close(fd_);
    fd_ = -1;
  }

 private:
  struct File {
    dev_t device = 0;
    ino_t inode = 0;
  };

  int fd_ = -1;
  File file_{};
};

}  // namespace ronde
