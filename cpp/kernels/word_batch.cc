#include "kernels/word_batch.h"

#include "kernels/reduce_kernels.h"

namespace ronde {

const WordKernels& best_word_kernels() { return *available_kernels().front()->words; }

}  // namespace ronde
