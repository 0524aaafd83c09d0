// Whole collectives in one native call, for arrays that need no preparation.
#pragma once

#include <nanobind/nanobind.h>

#include "communicator/communicator.h"

namespace ronde {

void bind_ready_arrays(nanobind::class_<Communicator>& communicator);

}  // namespace ronde
