// The reduction kernels, in terms of vectors of kVectorBytes. CMake compiles this file once for every instruction set,
// into namespace ronde::RONDE_ISA, always with -ffp-contract=off, so that all versions round alike.
//
// The loop reads a chunk of a few vectors from every source, keeps the accumulators in registers, and stores to the
// destinations after it has read the chunk of all sources. So a destination may be any of the sources. With more than
// kBlockSources sources it takes larger chunks, blocks(), whose accumulators lie in a buffer on the stack. The same
// code handles the remaining elements on a zero-padded vector.
//
// Everything here has internal linkage and uses nothing of the standard library that could be emitted out of line: the
// linker keeps one copy of an inline function, which could be the one that needs AVX-512.
#include "kernels/reduce_kernels.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/reduce_elements.h"
#include "kernels/reduction.h"

namespace ronde::RONDE_ISA {

extern const AdasumKernels kAdasumKernels;
extern const CenterKernels kCenterKernels;
extern const TopicKernels kTopicKernels;
extern const ScaleKernels kScaleKernels;
extern const WordKernels kWordKernels;

namespace {

// Vectors from each source in turn. Eight were no faster, nor was prefetching.
constexpr int kChunkVectors = 4;
// Sources that are read together, and vectors from each of them, where there are more.
constexpr int kBlockSources = 8;
constexpr int kBlockVectors = 32;

// --- Operations -----------------------------------------------------------------------------------------------------

// Integers as wide as the numbers of a vector, which comparisons return.
template <class V>
using Mask = decltype(V{} == V{});
template <class V>
constexpr bool kIsFloat = std::is_floating_point_v<std::remove_cvref_t<decltype(V{}[0])>>;

struct Sum {
  template <class V>
  static V apply(V a, V b) {
    return a + b;
  }
};

struct Average : Sum {};  // followed by a division

struct Product {
  template <class V>
  static V apply(V a, V b) {
    return a * b;
  }
};

// The least and the greatest of two floats do not depend on their order. Each is chosen twice, with the operands in
// either order (one instruction on x86). The two choices have the same bits, except in two cases: they are the two
// operands if these are zeros of different sign, or if one is a NaN. The least has the bits of either, so a zero is
// negative if one is, and a NaN remains one. The greatest has them, too, except for the sign, which both must have.

struct Min {
  template <class V>
  static V apply(V a, V b) {
    const V one = a < b ? a : b;
    if constexpr (!kIsFloat<V>) {
      return one;
    } else {
      const V other = b < a ? b : a;
      return (V)((Mask<V>)one | (Mask<V>)other);
    }
  }
};

struct Max {
  template <class V>
  static V apply(V a, V b) {
    const V one = a > b ? a : b;
    if constexpr (!kIsFloat<V>) {
      return one;
    } else {
      const V other = b > a ? b : a;
      return (V)majority((Mask<V>)one, (Mask<V>)other, ~(Mask<V>)-V{});
    }
  }

 private:
  // The bits that two of the three have.
  template <class M>
  static M majority(M a, M b, M c) {
#if defined(__AVX512F__)
    return (M)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0xe8);
#else
    return (a & b) | ((a | b) & c);
#endif
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

// Real and imaginary parts alternate in the vector. It avoids subtraction, because GCC 12 fuses alternating additions
// and subtractions of products in spite of -ffp-contract=off. No complex number is neutral: times infinity, 1 + 0i is
// not infinity but NaN. So the factor of an absent rank consists of two special NaN (reduction.h), and is left out.
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
    const V product = real * b + imaginary * swapped * signs;
    using Bits = std::remove_cvref_t<decltype(Mask<V>{}[0])>;
    constexpr auto kAbsent = static_cast<Bits>(kAbsentFactor<sizeof(Bits)>);
    return (Mask<V>)b == kAbsent ? a : (Mask<V>)a == kAbsent ? b : product;
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

// One step of the loop, with load(source, k) and store(destination, k, vector) for k < kVectors.
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

// As many steps of kVectors accumulators as fit between the elements `first` and `count`; returns where it stopped.
template <class Source, class Destination, class Op, int kVectors>
[[gnu::always_inline]] inline size_t steps(void* const* destinations, int destination_count, const void* const* sources,
                                           int source_count, size_t first, size_t count, int divisor) {
  constexpr size_t kItems = Source::kItems;
  for (; count - first >= kVectors * kItems; first += kVectors * kItems) {
    step<Source, Op, kVectors>(
        destination_count, source_count, divisor,
        [=](int source, int k) __attribute__((always_inline)) {
          return Source::load(static_cast<const char*>(sources[source]) + (first + k * kItems) * Source::kBytes);
        },
        [=](int destination, int k, typename Source::Accumulator vector) __attribute__((always_inline)) {
          Destination::store(static_cast<char*>(destinations[destination]) + (first + k * kItems) * Destination::kBytes,
                             vector);
        });
  }
  return first;
}

// The same for many sources, as many whole blocks as there are. A processor follows only some streams of memory ahead
// of its use, so each source is read a block long, a few sources at a time, in the same order.
template <class Source, class Destination, class Op>
[[gnu::noinline]] size_t blocks(void* const* destinations, int destination_count, const void* const* sources,
                                int source_count, size_t count, int divisor) {
  constexpr size_t kItems = Source::kItems;
  typename Source::Accumulator sums[kBlockVectors];
  size_t first = 0;
  for (; count - first >= kBlockVectors * kItems; first += kBlockVectors * kItems) {
    for (int begin = 0, end = 0; begin < source_count; begin = end) {
      end = begin + kBlockSources < source_count ? begin + kBlockSources : source_count;
      for (int chunk = 0; chunk < kBlockVectors; chunk += kChunkVectors) {
        const auto load = [=](int source, int k) __attribute__((always_inline)) {
          return Source::load(static_cast<const char*>(sources[source]) +
                              (first + (chunk + k) * kItems) * Source::kBytes);
        };
        typename Source::Accumulator accumulators[kChunkVectors];
        for (int k = 0; k < kChunkVectors; ++k) accumulators[k] = begin == 0 ? load(0, k) : sums[chunk + k];
        for (int source = begin == 0 ? 1 : begin; source < end; ++source) {
#pragma GCC unroll 8
          for (int k = 0; k < kChunkVectors; ++k) accumulators[k] = apply<Op>(accumulators[k], load(source, k));
        }
        for (int k = 0; k < kChunkVectors; ++k) {
          if constexpr (std::is_same_v<Op, Average>) {
            if (end == source_count) accumulators[k] /= static_cast<typename Source::Value>(divisor);
          }
          sums[chunk + k] = accumulators[k];
        }
      }
    }
    constexpr bool is_rounded = sizeof(sums[0]) != kItems * Destination::kBytes;
    for (int destination = 0; destination < destination_count; ++destination) {
      char* const to = static_cast<char*>(destinations[destination]) + first * Destination::kBytes;
      if (is_rounded && destination > 0) {  // rounding once and copying is faster than rounding again
        std::memcpy(to, static_cast<const char*>(destinations[0]) + first * Destination::kBytes,
                    kBlockVectors * kItems * Destination::kBytes);
        continue;
      }
      for (int k = 0; k < kBlockVectors; ++k) Destination::store(to + k * kItems * Destination::kBytes, sums[k]);
    }
  }
  return first;
}

// Reduces elements of one type to elements of the same or another type with the same layout in accumulators.
template <class Source, class Destination, class Op>
void run_between(void* const* destinations, int destination_count, const void* const* sources, int source_count,
                 size_t count, int divisor) {
  static_assert(Source::kItems == Destination::kItems);
  size_t first = 0;
  if (source_count == 2 && destination_count <= 2) {
    // Two ranks: the compiler knows the counts and keeps the pointers in registers.
    const void* const two_sources[] = {sources[0], sources[1]};
    void* const two_destinations[] = {destinations[0], destinations[destination_count - 1]};
    first =
        destination_count == 1
            ? steps<Source, Destination, Op, kChunkVectors>(two_destinations, 1, two_sources, 2, first, count, divisor)
            : steps<Source, Destination, Op, kChunkVectors>(two_destinations, 2, two_sources, 2, first, count, divisor);
  } else {
    if (source_count > kBlockSources) {
      first = blocks<Source, Destination, Op>(destinations, destination_count, sources, source_count, count, divisor);
    }
    first = steps<Source, Destination, Op, kChunkVectors>(destinations, destination_count, sources, source_count, first,
                                                          count, divisor);
  }
  first =
      steps<Source, Destination, Op, 1>(destinations, destination_count, sources, source_count, first, count, divisor);
  if (first == count) return;
  step<Source, Op, 1>(
      destination_count, source_count, divisor,
      [=](int source, int) {
        char padded[Source::kItems * Source::kBytes] = {};
        std::memcpy(padded, static_cast<const char*>(sources[source]) + first * Source::kBytes,
                    (count - first) * Source::kBytes);
        return Source::load(padded);
      },
      [=](int destination, int, typename Source::Accumulator vector) {
        char padded[Destination::kItems * Destination::kBytes];
        Destination::store(padded, vector);
        std::memcpy(static_cast<char*>(destinations[destination]) + first * Destination::kBytes, padded,
                    (count - first) * Destination::kBytes);
      });
}

template <class Element, class Op>
void run(void* const* destinations, int destination_count, const void* const* sources, int source_count, size_t count,
         int divisor) {
  run_between<Element, Element, Op>(destinations, destination_count, sources, source_count, count, divisor);
}

// The average of integers: sums in an integer type with room for the sum and divides towards zero.
template <class Integer>
void average_integers(void* const* destinations, int destination_count, const void* const* sources, int source_count,
                      size_t count, int divisor) {
  __extension__ using Wide128 = __int128;
  using Wide = std::conditional_t<sizeof(Integer) < 8, int64_t, Wide128>;
  constexpr size_t kBlock = 256;
  for (size_t first = 0; first < count; first += kBlock) {
    const size_t items = count - first < kBlock ? count - first : kBlock;
    Wide sums[kBlock] = {};
    Integer numbers[kBlock];
    for (int source = 0; source < source_count; ++source) {
      std::memcpy(numbers, static_cast<const Integer*>(sources[source]) + first, items * sizeof(Integer));
      for (size_t i = 0; i < items; ++i) sums[i] += numbers[i];
    }
    for (size_t i = 0; i < items; ++i) numbers[i] = static_cast<Integer>(sums[i] / divisor);
    for (int destination = 0; destination < destination_count; ++destination) {
      std::memcpy(static_cast<Integer*>(destinations[destination]) + first, numbers, items * sizeof(Integer));
    }
  }
}

// Applies the kernel of a type to a larger type that consists of kTimes numbers of it.
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

template <class Small>
constexpr void set_small(Kernels& kernels, DType dtype) {
  set_real<Small>(kernels, dtype);
  const int row = static_cast<int>(dtype);
  const int sum = static_cast<int>(ReduceOp::kSum), average = static_cast<int>(ReduceOp::kAverage),
            product = static_cast<int>(ReduceOp::kProduct);
  kernels.widening[row][sum] = run_between<Small, PartialOf<Small>, Sum>;
  kernels.widening[row][product] = run_between<Small, PartialOf<Small>, Product>;
  kernels.narrowing[row][sum] = run_between<PartialOf<Small>, Small, Sum>;
  kernels.narrowing[row][average] = run_between<PartialOf<Small>, Small, Average>;
  kernels.narrowing[row][product] = run_between<PartialOf<Small>, Small, Product>;
}

template <class Part>
constexpr void set_complex(Kernels& kernels, DType dtype) {
  set(kernels, dtype, ReduceOp::kSum, run_parts<run<Plain<Part>, Sum>, 2>);
  set(kernels, dtype, ReduceOp::kAverage, run_parts<run<Plain<Part>, Average>, 2>);
  set(kernels, dtype, ReduceOp::kProduct, run_parts<run<Plain<Part>, ComplexProduct>, 2>);
}

// Only min, max and average depend on the sign; sums and products wrap, so they are computed unsigned.
template <class Integer>
constexpr void set_integer(Kernels& kernels, DType dtype) {
  using Unsigned = std::make_unsigned_t<Integer>;
  set(kernels, dtype, ReduceOp::kSum, run<Plain<Unsigned>, Sum>);
  set(kernels, dtype, ReduceOp::kAverage, average_integers<Integer>);
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
  kernels.centers = &kCenterKernels;
  kernels.topics = &kTopicKernels;
  kernels.scale = &kScaleKernels;
  kernels.words = &kWordKernels;
  set_bool(kernels);
  set_integer<uint8_t>(kernels, DType::kUint8);
  set_integer<uint16_t>(kernels, DType::kUint16);
  set_integer<uint32_t>(kernels, DType::kUint32);
  set_integer<uint64_t>(kernels, DType::kUint64);
  set_integer<int8_t>(kernels, DType::kInt8);
  set_integer<int16_t>(kernels, DType::kInt16);
  set_integer<int32_t>(kernels, DType::kInt32);
  set_integer<int64_t>(kernels, DType::kInt64);
  set_small<Float16>(kernels, DType::kFloat16);
  set_small<Bfloat16>(kernels, DType::kBfloat16);
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
