// Blocks all signals while it exists. The library's threads start under it and inherit the mask: a signal delivered to
// one of them would not interrupt the program's waiting main thread.
#pragma once

#include <signal.h>

namespace ronde {

class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace ronde
