// Takes the Python stacks of all threads of this process without the interpreter's lock: a signal handler that Python
// has installed (faulthandler.register) writes them into a file, and the calling thread sends itself the signal. So it
// works while another thread holds the interpreter's lock inside a call that never returns.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <mutex>
#include <string>

namespace ronde {

class StackTaker {
 public:
  StackTaker() = default;
  // `signal`: its handler, which must be installed already, writes into `file`. 0: there is no handler.
  StackTaker(int signal, int file) : signal_(signal), file_(file), handler_(handler_of(signal)) {}

  // Only for a thread that blocks signals. Returns an empty text on failure, also if the program has installed another
  // handler for the signal since: then it does not send the signal.
  std::string take_stacks() const {
    if (signal_ == 0 || handler_of(signal_) != handler_ || handler_ == SIG_DFL || handler_ == SIG_IGN) return "";
    static std::mutex one_at_a_time;  // the process has one handler and one file
    const std::lock_guard lock(one_at_a_time);
    if (ftruncate(file_, 0) != 0 || lseek(file_, 0, SEEK_SET) != 0) return "";
    sigset_t ours, before;
    sigemptyset(&ours);
    sigaddset(&ours, signal_);
    pthread_sigmask(SIG_UNBLOCK, &ours, &before);
    pthread_kill(pthread_self(), signal_);  // handled before it returns
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    std::string text(kMostBytes, '\0');
    const ssize_t got = pread(file_, text.data(), text.size(), 0);
    text.resize(got > 0 ? static_cast<size_t>(got) : 0);
    return text;
  }

  // The current handler of a signal; SIG_DFL if sigaction(2) fails.
  static void (*handler_of(int signal))(int) {
    struct sigaction action{};
    return signal != 0 && sigaction(signal, nullptr, &action) == 0 ? action.sa_handler : SIG_DFL;
  }

 private:
  static constexpr size_t kMostBytes = 64 * 1024;
  int signal_ = 0;
  int file_ = -1;
  void (*handler_)(int) = nullptr;
};

}  // namespace ronde
