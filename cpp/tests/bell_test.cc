// Rings of a bell whose owner sleeps in poll(2).
#include "waiting/bell.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

namespace ronde {
namespace {

bool is_readable(int fd) {
  pollfd looked_at{fd, POLLIN, 0};
  CHECK(poll(&looked_at, 1, 0) >= 0);
  return (looked_at.revents & POLLIN) != 0;
}

void test_a_ring_wakes_only_a_sleeper() {
  Bell bell;
  const Descriptor eventfd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  const BellHandle handle(&bell, &eventfd);
  handle.ring();
  CHECK(!is_readable(eventfd.get()));
  handle.prepare(Sleep::kPoll);
  handle.ring();
  CHECK(is_readable(eventfd.get()));
}

// As after os.closerange() in a Python program that then opens files.
void test_a_ring_spares_a_file_with_the_number_of_a_closed_eventfd() {
  Bell bell;
  const Descriptor eventfd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  const BellHandle handle(&bell, &eventfd);
  handle.prepare(Sleep::kPoll);
  close(eventfd.get());
  handle.ring();
  const Descriptor file(memfd_create("test", MFD_CLOEXEC));
  CHECK(file.get() == eventfd.get());
  handle.ring();
  struct stat status{};
  CHECK(fstat(file.get(), &status) == 0 && status.st_size == 0);
}

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_a_ring_wakes_only_a_sleeper();
  ronde::test_a_ring_spares_a_file_with_the_number_of_a_closed_eventfd();
  return 0;
}
