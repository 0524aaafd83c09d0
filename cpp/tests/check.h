// The smallest test harness that does the job: CHECK counts, prints where and what, and the program's exit code tells.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (0)

#define CHECK_THROWS(expression, exception)                                                              \
  do {                                                                                                   \
    bool thrown = false;                                                                                 \
    try {                                                                                                \
      (void)(expression);                                                                                \
    } catch (const exception&) {                                                                         \
      thrown = true;                                                                                     \
    }                                                                                                    \
    if (!thrown) {                                                                                       \
      std::fprintf(stderr, "%s:%d: %s did not throw %s\n", __FILE__, __LINE__, #expression, #exception); \
      std::exit(1);                                                                                      \
    }                                                                                                    \
  } while (0)
