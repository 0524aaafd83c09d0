// The interpreter's lock, for threads that may still run when the interpreter ends.
//
// At that time CPython up to 3.13 forcibly unwinds (pthread_exit) a daemon thread that takes the lock again, which
// aborts the process at the first destructor, or in nanobind's dispatch. Here such a thread sleeps until the process is
// gone, as CPython itself does from 3.14 on.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace ronde {

// Runs code that takes the lock, or that runs Python, which may release the lock and take it again.
template <class Body>
decltype(auto) sleeping_at_exit(Body&& body) {
  try {
    return body();
  } catch (abi::__forced_unwind&) {
    while (true) ::pause();
  }
}

// Releases the lock while it exists.
class ReleaseGil {
 public:
  ReleaseGil() : state_(PyEval_SaveThread()) {}
  ~ReleaseGil() {
    sleeping_at_exit([this] { PyEval_RestoreThread(state_); });
  }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

// Holds the lock while it exists.
class TakeGil {
 public:
  TakeGil() : state_(sleeping_at_exit([] { return PyGILState_Ensure(); })) {}
  ~TakeGil() { PyGILState_Release(state_); }
  TakeGil(const TakeGil&) = delete;
  TakeGil& operator=(const TakeGil&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace ronde
