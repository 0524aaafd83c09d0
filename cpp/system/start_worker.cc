// A program that executes a command such that the kernel kills it when the parent dies.
//
//     start_worker PARENT_PID CORES COMMAND [ARGUMENT]...
//
// CORES are the numbers, separated by commas, of the cores to which it binds the command, or "any". It does the same as
// src/ronde/process/die_with_parent.py, which replaces it where it was not built, but without starting an interpreter,
// which would take a tenth of a worker's start.
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kCannotStart = 126;

bool Bind(const char* cores) {
  if (std::strcmp(cores, "any") == 0) return true;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const char* rest = cores; *rest != '\0';) {
    char* end = nullptr;
    const long core = std::strtol(rest, &end, 10);
    if (end == rest || core < 0 || core >= CPU_SETSIZE || (*end != ',' && *end != '\0')) {
      errno = EINVAL;
      return false;
    }
    CPU_SET(static_cast<unsigned>(core), &set);
    rest = *end == ',' ? end + 1 : end;
  }
  return sched_setaffinity(0, sizeof set, &set) == 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return kCannotStart;
  char** command = argv + 3;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != std::atoi(argv[1])) kill(getpid(), SIGKILL);  // the parent died before prctl()
  signal(SIGPIPE, SIG_DFL);                                      // Python ignores it, and exec would keep that
  signal(SIGXFSZ, SIG_DFL);
  sigset_t none;  // some platforms, such as Ray, block SIGINT in their processes, and children inherit that
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (Bind(argv[2])) execv(command[0], command);
  std::fprintf(stderr, "cannot start %s: %s\n", command[0], std::strerror(errno));
  return kCannotStart;
}
