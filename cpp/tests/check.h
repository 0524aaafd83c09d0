// A minimal test harness: a failed CHECK prints its place and condition and ends the program with exit code 1.
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
