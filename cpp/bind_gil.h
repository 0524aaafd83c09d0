// The interpreter's lock. When the interpreter ends, CPython up to 3.13 unwinds by force (pthread_exit) a daemon thread
// that wants the lock again, and that aborts the process at the first destructor, or in nanobind's dispatch. Here such
// a thread sleeps until the process is gone instead, as from 3.14 on it does by itself.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace ronde {

// Runs what takes the lock, or what runs Python, which may let go of it and take it again.
template <class Body>
decltype(auto) sleeping_at_exit(Body&& body) {
  try {
    return body();
  } catch (abi::__forced_unwind&) {
    while (true) ::pause();
  }
}

// Without the lock for as long as it lives.
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

// With the lock for as long as it lives.
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
