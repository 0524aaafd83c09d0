#include "kernels/reduce.h"

#include <string>

#include "base/error.h"
#include "kernels/reduce_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ronde {

// Each namespace holds the *_kernels.cc, compiled for one instruction set.
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace neon {
extern const Kernels kKernels;
}
namespace baseline {
extern const Kernels kKernels;
}

namespace {

#if defined(__x86_64__)
// Uses CPUID because not every compiler's __builtin_cpu_supports knows "f16c".
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

std::span<const Kernels* const> find_kernels() {
  static constexpr const Kernels* kAll[] = {&avx512::kKernels, &avx2::kKernels, &baseline::kKernels};
  const bool has_avx2 = __builtin_cpu_supports("avx2") && has_f16c();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return std::span(kAll).subspan(has_avx512 ? 0 : has_avx2 ? 1 : 2);
}
#else
std::span<const Kernels* const> find_kernels() {
#if defined(__aarch64__)
  static constexpr const Kernels* kAll[] = {&neon::kKernels};  // every 64-bit Arm processor has it
#else
  static constexpr const Kernels* kAll[] = {&baseline::kKernels};
#endif
  return kAll;
}
#endif

// Chosen when the library is loaded, not at the first use: a child forked during another thread's first use would wait
// for ever.
const std::span<const Kernels* const> kAvailable = find_kernels();

const Kernels& best_kernels() { return *kAvailable.front(); }

// nullptr if `op` is not defined for `dtype`, or either is unknown.
Kernel find_kernel(const Reduction& reduction) {
  const auto in = [&](const Kernel(&table)[kDTypeCount][kReduceOpCount], DType dtype) -> Kernel {
    const int row = static_cast<int>(dtype), column = static_cast<int>(reduction.op);
    return row < kDTypeCount && column < kReduceOpCount ? table[row][column] : nullptr;
  };
  if (reduction.dtype == reduction.result) return in(best_kernels().table, reduction.dtype);
  if (reduction.result == DType::kFloat32) return in(best_kernels().widening, reduction.dtype);
  return reduction.dtype == DType::kFloat32 ? in(best_kernels().narrowing, reduction.result) : nullptr;
}

}  // namespace

std::span<const Kernels* const> available_kernels() { return kAvailable; }

bool is_supported(DType dtype, ReduceOp op) { return find_kernel({dtype, op, 1}) != nullptr; }

void reduce(const Reduction& reduction, void* destination, const void* const* sources, int source_count, size_t count) {
  reduce_to_all(reduction, &destination, 1, sources, source_count, count);
}

void reduce_to_all(const Reduction& reduction, void* const* destinations, int destination_count,
                   const void* const* sources, int source_count, size_t count) {
  const Kernel kernel = find_kernel(reduction);
  if (kernel == nullptr) {
    throw UsageError(std::string("the reduction ") + name_of(reduction.op) + " is not defined for " +
                     name_of(reduction.dtype));
  }
  kernel(destinations, destination_count, sources, source_count, count, reduction.divisor);
}

bool has_dot_products(DType dtype) {
  const int row = static_cast<int>(dtype);
  return row < kDTypeCount && best_kernels().adasum->dot[row] != nullptr;
}

void add_dot_products(DType dtype, const void* a, const void* b, size_t count, double* products) {
  best_kernels().adasum->dot[static_cast<int>(dtype)](a, b, count, products);
}

void weighted_sum(DType dtype, void* out, const void* a, double weight_a, const void* b, double weight_b,
                  size_t count) {
  best_kernels().adasum->weighted_sum[static_cast<int>(dtype)](out, a, weight_a, b, weight_b, count);
}

}  // namespace ronde
