// Signals belong to the threads of the program: one that is delivered to a thread of ours would not interrupt a waiting
// main thread. A new thread inherits the mask.
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
