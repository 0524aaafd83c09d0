// The check of arrays that functions of estimators get from their own Python code, whose users never see the error.
#pragma once

#include <string>

#include "binding/border.h"

namespace ronde {

// Raises UsageError unless the condition holds; `what` is wrong with the arrays.
inline void require_arrays(bool condition, const char* what) {
  if (!condition) raise("UsageError", std::string("the arrays do not match: ") + what);
}

}  // namespace ronde
