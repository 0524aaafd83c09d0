// The reduction kernels, in terms of vectors of kVectorBytes. CMake compiles this file once for every instruction set,
// into namespace ronde::RONDE_ISA, always with -ffp-contract=off: all versions round alike.
//
// The loop takes a chunk of a few vectors from every source, keeps the accumulators in registers, and stores to the
// destinations when all sources of the chunk have been read. So there is no intermediate buffer, and a destination may
// be any of the sources. The same code, on a zero-padded vector, does the elements left over at the end.
//
// Everything here has internal linkage, and nothing of the standard library that could be emitted out of line is used:
// the linker keeps one copy of an inline function, and it could be the one that needs AVX-512.
#include "reduce_kernels.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "reduce_elements.h"

namespace ronde::RONDE_ISA {

extern const AdasumKernels kAdasumKernels;

namespace {

// From each buffer in turn. Eight gained nothing, and neither did prefetching.
constexpr int kChunkVectors = 4;

// --- Operations -----------------------------------------------------------------------------------------------------

struct Sum {
  template <class V>
  static V apply(V a, V b) {
    return a + b;
  }
};

struct Average : Sum {};  // and a division at the end

struct Product {
  template <class V>
  static V apply(V a, V b) {
    return a * b;
  }
};

// `a != a` finds NaN in the first; a NaN in the second makes `<` false.
struct Min {
  template <class V>
  static V apply(V a, V b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

struct Max {
  template <class V>
  static V apply(V a, V b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

struct BitAnd {
  template <class V>
  static V apply(V a, V b) {
    return a & b;
  }
};

struct BitOr {
  template <class V>
  static V apply(V a, V b) {
    return a | b;
  }
};

struct BitXor {
  template <class V>
  static V apply(V a, V b) {
    return a ^ b;
  }
};

// Real and imaginary parts alternate in the vector. Written without a subtraction, since GCC 12 makes alternating
// additions and subtractions of products into fused ones in spite of -ffp-contract=off.
struct ComplexProduct {
  template <class V>
  static V apply(V a, V b) {
    V real, imaginary, swapped, signs;
    for (size_t i = 0; i < sizeof(V) / sizeof(a[0]); i += 2) {
      real[i] = real[i + 1] = a[i];
      imaginary[i] = imaginary[i + 1] = a[i + 1];
      swapped[i] = b[i + 1];
      swapped[i + 1] = b[i];
      signs[i] = -1;
      signs[i + 1] = 1;
    }
    return real * b + imaginary * swapped * signs;
  }
};

template <class Op, class V>
V apply(V a, V b) {
  return Op::apply(a, b);
}

template <class Op>
FloatPair apply(FloatPair a, FloatPair b) {
  return {Op::apply(a.first, b.first), Op::apply(a.second, b.second)};
}

// --- The loop -------------------------------------------------------------------------------------------------------

// One step: load(source, k) and store(destination, k, vector) for k < kVectors.
template <class Element, class Op, int kVectors, class Load, class Store>
[[gnu::always_inline]] inline void step(int destination_count, int source_count, int divisor, Load load, Store store) {
  typename Element::Accumulator accumulators[kVectors];
#pragma GCC unroll 8
  for (int k = 0; k < kVectors; ++k) accumulators[k] = load(0, k);
  for (int source = 1; source < source_count; ++source) {
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) accumulators[k] = apply<Op>(accumulators[k], load(source, k));
  }
  if constexpr (std::is_same_v<Op, Average>) {
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) accumulators[k] /= static_cast<typename Element::Value>(divisor);
  }
  for (int destination = 0; destination < destination_count; ++destination) {
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) store(destination, k, accumulators[k]);
  }
}

// As many steps of kVectors as fit between the bytes `offset` and `end`; returns where it stopped.
template <class Element, class Op, int kVectors>
[[gnu::always_inline]] inline size_t steps(void* const* destinations, int destination_count, const void* const* sources,
                                           int source_count, size_t offset, size_t end, int divisor) {
  constexpr size_t kStepBytes = size_t{kVectors} * kVectorBytes;
  for (; end - offset >= kStepBytes; offset += kStepBytes) {
    step<Element, Op, kVectors>(
        destination_count, source_count, divisor,
        [=](int source, int k) __attribute__((always_inline)) {
          return Element::load(static_cast<const char*>(sources[source]) + offset + k * kVectorBytes);
        },
        [=](int destination, int k, typename Element::Accumulator vector) __attribute__((always_inline)) {
          Element::store(static_cast<char*>(destinations[destination]) + offset + k * kVectorBytes, vector);
        });
  }
  return offset;
}

template <class Element, class Op>
void run(void* const* destinations, int destination_count, const void* const* sources, int source_count, size_t count,
         int divisor) {
  const size_t end = count * Element::kBytes;
  size_t offset = 0;
  if (source_count == 2 && destination_count <= 2) {
    // Two ranks: constant numbers and pointers in registers.
    const void* const two_sources[] = {sources[0], sources[1]};
    void* const two_destinations[] = {destinations[0], destinations[destination_count - 1]};
    offset = destination_count == 1
                 ? steps<Element, Op, kChunkVectors>(two_destinations, 1, two_sources, 2, offset, end, divisor)
                 : steps<Element, Op, kChunkVectors>(two_destinations, 2, two_sources, 2, offset, end, divisor);
  } else {
    offset =
        steps<Element, Op, kChunkVectors>(destinations, destination_count, sources, source_count, offset, end, divisor);
  }
  offset = steps<Element, Op, 1>(destinations, destination_count, sources, source_count, offset, end, divisor);
  if (offset == end) return;
  step<Element, Op, 1>(
      destination_count, source_count, divisor,
      [=](int source, int) {
        char padded[kVectorBytes] = {};
        std::memcpy(padded, static_cast<const char*>(sources[source]) + offset, end - offset);
        return Element::load(padded);
      },
      [=](int destination, int, typename Element::Accumulator vector) {
        char padded[kVectorBytes];
        Element::store(padded, vector);
        std::memcpy(static_cast<char*>(destinations[destination]) + offset, padded, end - offset);
      });
}

// The kernel of a smaller type, used for a type that consists of kTimes of it.
template <Kernel kernel, size_t kTimes>
void run_parts(void* const* destinations, int destination_count, const void* const* sources, int source_count,
               size_t count, int divisor) {
  kernel(destinations, destination_count, sources, source_count, count * kTimes, divisor);
}

// --- The table ------------------------------------------------------------------------------------------------------

constexpr void set(Kernels& kernels, DType dtype, ReduceOp op, Kernel kernel) {
  kernels.table[static_cast<int>(dtype)][static_cast<int>(op)] = kernel;
}

template <class Element>
constexpr void set_real(Kernels& kernels, DType dtype) {
  set(kernels, dtype, ReduceOp::kSum, run<Element, Sum>);
  set(kernels, dtype, ReduceOp::kAverage, run<Element, Average>);
  set(kernels, dtype, ReduceOp::kMin, run<Element, Min>);
  set(kernels, dtype, ReduceOp::kMax, run<Element, Max>);
  set(kernels, dtype, ReduceOp::kProduct, run<Element, Product>);
}

template <class Part>
constexpr void set_complex(Kernels& kernels, DType dtype) {
  set(kernels, dtype, ReduceOp::kSum, run_parts<run<Plain<Part>, Sum>, 2>);
  set(kernels, dtype, ReduceOp::kAverage, run_parts<run<Plain<Part>, Average>, 2>);
  set(kernels, dtype, ReduceOp::kProduct, run_parts<run<Plain<Part>, ComplexProduct>, 2>);
}

// Only the order depends on the sign; sums and products wrap and are computed unsigned.
template <class Integer>
constexpr void set_integer(Kernels& kernels, DType dtype) {
  using Unsigned = std::make_unsigned_t<Integer>;
  set(kernels, dtype, ReduceOp::kSum, run<Plain<Unsigned>, Sum>);
  set(kernels, dtype, ReduceOp::kMin, run<Plain<Integer>, Min>);
  set(kernels, dtype, ReduceOp::kMax, run<Plain<Integer>, Max>);
  set(kernels, dtype, ReduceOp::kProduct, run<Plain<Unsigned>, Product>);
  set(kernels, dtype, ReduceOp::kBitAnd, run_parts<run<Plain<uint8_t>, BitAnd>, sizeof(Integer)>);
  set(kernels, dtype, ReduceOp::kBitOr, run_parts<run<Plain<uint8_t>, BitOr>, sizeof(Integer)>);
  set(kernels, dtype, ReduceOp::kBitXor, run_parts<run<Plain<uint8_t>, BitXor>, sizeof(Integer)>);
}

constexpr void set_bool(Kernels& kernels) {
  set(kernels, DType::kBool, ReduceOp::kSum, run<Bool, BitOr>);
  set(kernels, DType::kBool, ReduceOp::kMin, run<Bool, BitAnd>);
  set(kernels, DType::kBool, ReduceOp::kMax, run<Bool, BitOr>);
  set(kernels, DType::kBool, ReduceOp::kProduct, run<Bool, BitAnd>);
  set(kernels, DType::kBool, ReduceOp::kBitAnd, run<Bool, BitAnd>);
  set(kernels, DType::kBool, ReduceOp::kBitOr, run<Bool, BitOr>);
  set(kernels, DType::kBool, ReduceOp::kBitXor, run<Bool, BitXor>);
}

constexpr Kernels make_kernels(const char* instruction_set) {
  Kernels kernels{};
  kernels.instruction_set = instruction_set;
  kernels.adasum = &kAdasumKernels;
  set_bool(kernels);
  set_integer<uint8_t>(kernels, DType::kUint8);
  set_integer<uint16_t>(kernels, DType::kUint16);
  set_integer<uint32_t>(kernels, DType::kUint32);
  set_integer<uint64_t>(kernels, DType::kUint64);
  set_integer<int8_t>(kernels, DType::kInt8);
  set_integer<int16_t>(kernels, DType::kInt16);
  set_integer<int32_t>(kernels, DType::kInt32);
  set_integer<int64_t>(kernels, DType::kInt64);
  set_real<Float16>(kernels, DType::kFloat16);
  set_real<Bfloat16>(kernels, DType::kBfloat16);
  set_real<Plain<float>>(kernels, DType::kFloat32);
  set_real<Plain<double>>(kernels, DType::kFloat64);
  set_complex<float>(kernels, DType::kComplex64);
  set_complex<double>(kernels, DType::kComplex128);
  return kernels;
}

#define RONDE_STRING_OF(name) #name
#define RONDE_STRING(name) RONDE_STRING_OF(name)

}  // namespace

extern constinit const Kernels kKernels;
constinit const Kernels kKernels = make_kernels(RONDE_STRING(RONDE_ISA));

}  // namespace ronde::RONDE_ISA
