// Private to the *_kernels.cc: vectors of kVectorBytes, and the conversion of each dtype's numbers into them and back.
// Like those files it is compiled once for every instruction set, has internal linkage, and uses nothing of the
// standard library that could be emitted out of line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ronde::RONDE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vector = typename VectorOf<T>::Type;

using Floats = Vector<float>;
using Words = Vector<uint32_t>;
using Integers = Vector<int32_t>;

// As many numbers of a narrower type as a vector has doubles.
using Doubles = Vector<double>;
constexpr int kDoubles = kVectorBytes / sizeof(double);
template <class T>
struct NarrowOf {
  typedef T Type __attribute__((vector_size(sizeof(T) * kDoubles)));
};
template <class T>
using Narrow = typename NarrowOf<T>::Type;

template <class V>
[[gnu::always_inline]] inline V load_vector(const char* from) {
  V vector;
  std::memcpy(&vector, from, sizeof vector);  // an unaligned load
  return vector;
}

template <class V>
[[gnu::always_inline]] inline void store_vector(char* to, V vector) {
  std::memcpy(to, &vector, sizeof vector);
}

// An element type defines how kItems numbers in memory (`kBytes` each) are loaded into an accumulator and stored, and
// the type in which it computes (`Value`). Element types of real numbers also have load_doubles(), which loads kDoubles
// numbers in order.

template <class T>
struct Plain {
  using Value = T;
  using Accumulator = Vector<T>;
  static constexpr size_t kBytes = sizeof(T);
  static constexpr size_t kItems = kVectorBytes / kBytes;
  static Accumulator load(const char* from) { return load_vector<Accumulator>(from); }
  static void store(char* to, Accumulator vector) { store_vector(to, vector); }
  static Doubles load_doubles(const char* from) {
    return __builtin_convertvector(load_vector<Narrow<T>>(from), Doubles);
  }
};

// Any byte but 0 is true.
struct Bool : Plain<uint8_t> {
  static Accumulator load(const char* from) { return (Accumulator)(load_vector<Accumulator>(from) != 0) & 1; }
};

// A vector of 16-bit floats, widened.
struct FloatPair {
  Floats first;
  Floats second;
  FloatPair& operator/=(float divisor) {
    first /= divisor;
    second /= divisor;
    return *this;
  }
};

// The next two define the order of a pair in memory as float32 numbers.

// One half after the other.
struct Halves {
  static FloatPair load_floats(const char* from) {
    return {load_vector<Floats>(from), load_vector<Floats>(from + kVectorBytes)};
  }
  static void store_floats(char* to, FloatPair pair) {
    store_vector(to, pair.first);
    store_vector(to + kVectorBytes, pair.second);
  }
};

// The even elements in one vector and the odd ones in the other, as masks and shifts of 16-bit numbers produce them
// without a shuffle.
struct Alternating {
  static FloatPair load_floats(const char* from) {
    float lying[2 * kFloats], first[kFloats], second[kFloats];
    std::memcpy(lying, from, sizeof lying);
    for (int i = 0; i < kFloats; ++i) {
      first[i] = lying[2 * i];
      second[i] = lying[2 * i + 1];
    }
    FloatPair pair;
    std::memcpy(&pair.first, first, sizeof first);
    std::memcpy(&pair.second, second, sizeof second);
    return pair;
  }
  static void store_floats(char* to, FloatPair pair) {
    float lying[2 * kFloats], first[kFloats], second[kFloats];
    std::memcpy(first, &pair.first, sizeof first);
    std::memcpy(second, &pair.second, sizeof second);
    for (int i = 0; i < kFloats; ++i) {
      lying[2 * i] = first[i];
      lying[2 * i + 1] = second[i];
    }
    std::memcpy(to, lying, sizeof lying);
  }

 private:
  static constexpr int kFloats = kVectorBytes / sizeof(float);
};

struct Bfloat16 : Alternating {
  using Value = float;
  using Accumulator = FloatPair;
  static constexpr size_t kBytes = 2;
  static constexpr size_t kItems = kVectorBytes / kBytes;

  static FloatPair load(const char* from) {
    const Words words = load_vector<Words>(from);
    return {(Floats)(words << 16), (Floats)(words & 0xffff0000)};
  }
  static void store(char* to, FloatPair pair) {
    store_vector(to, rounded(pair.first) >> 16 | (rounded(pair.second) & 0xffff0000));
  }
  static Doubles load_doubles(const char* from) {
    const auto words = __builtin_convertvector(load_vector<Narrow<uint16_t>>(from), Narrow<uint32_t>);
    return __builtin_convertvector((Narrow<float>)(words << 16), Doubles);
  }

 private:
  // The upper half of each word, rounded to nearest even. A NaN becomes quiet and keeps its upper bits.
  static Words rounded(Floats floats) {
    const Words bits = (Words)floats;
    const Words even = bits + 0x7fff + ((bits >> 16) & 1);
    return floats != floats ? bits | 0x00400000 : even;
  }
};

#if defined(__AVX2__) || defined(__aarch64__)
using Float16Order = Halves;
#else
using Float16Order = Alternating;
#endif

struct Float16 : Float16Order {
  using Value = float;
  using Accumulator = FloatPair;
  static constexpr size_t kBytes = 2;
  static constexpr size_t kItems = kVectorBytes / kBytes;

#if defined(__AVX512F__)
  // Masked with all ones, because GCC 12 warns of an uninitialised value inside the plain intrinsics.
  static FloatPair load(const char* from) {
    return {_mm512_maskz_cvtph_ps(0xffff, load_vector<__m256i>(from)),
            _mm512_maskz_cvtph_ps(0xffff, load_vector<__m256i>(from + 32))};
  }
  static void store(char* to, FloatPair pair) {
    store_vector(to, _mm512_maskz_cvtps_ph(0xffff, pair.first, _MM_FROUND_TO_NEAREST_INT));
    store_vector(to + 32, _mm512_maskz_cvtps_ph(0xffff, pair.second, _MM_FROUND_TO_NEAREST_INT));
  }
  static Doubles load_doubles(const char* from) {
    return __builtin_convertvector((Narrow<float>)_mm256_cvtph_ps(load_vector<__m128i>(from)), Doubles);
  }
#elif defined(__AVX2__)
  static FloatPair load(const char* from) {
    return {_mm256_cvtph_ps(load_vector<__m128i>(from)), _mm256_cvtph_ps(load_vector<__m128i>(from + 16))};
  }
  static void store(char* to, FloatPair pair) {
    store_vector(to, _mm256_cvtps_ph(pair.first, _MM_FROUND_TO_NEAREST_INT));
    store_vector(to + 16, _mm256_cvtps_ph(pair.second, _MM_FROUND_TO_NEAREST_INT));
  }
  static Doubles load_doubles(const char* from) {
    const __m128i bits = {load_vector<long long>(from), 0};
    return __builtin_convertvector((Narrow<float>)_mm_cvtph_ps(bits), Doubles);
  }
#elif defined(__aarch64__)
  static FloatPair load(const char* from) {
    return {vcvt_f32_f16(load_vector<float16x4_t>(from)), vcvt_f32_f16(load_vector<float16x4_t>(from + 8))};
  }
  static void store(char* to, FloatPair pair) {
    store_vector(to, vcvt_f16_f32(pair.first));
    store_vector(to + 8, vcvt_f16_f32(pair.second));
  }
  static Doubles load_doubles(const char* from) {
    const uint64_t bits = load_vector<uint32_t>(from);
    return vcvt_f64_f32(vget_low_f32(vcvt_f32_f16(vreinterpret_f16_u64(vcreate_u64(bits)))));
  }
#else
  static FloatPair load(const char* from) {
    const Words words = load_vector<Words>(from);
    return {widened(words & 0xffff), widened(words >> 16)};
  }
  static void store(char* to, FloatPair pair) { store_vector(to, rounded(pair.first) | rounded(pair.second) << 16); }
  static Doubles load_doubles(const char* from) {
    Words words{};
    for (int i = 0; i < kDoubles; ++i) words[i] = load_vector<uint16_t>(from + 2 * i);
    const Floats floats = widened(words);
    Doubles doubles;
    for (int i = 0; i < kDoubles; ++i) doubles[i] = floats[i];
    return doubles;
  }

 private:
  // Gives the results of the instructions: exact; a NaN becomes quiet. (Compares signed numbers, because SSE2 has no
  // unsigned comparison.)
  static Floats widened(Words bits) {
    const Integers magnitude = (Integers)bits & 0x7fff;
    const Integers normal = (magnitude << 13) + ((127 - 15) << 23);
    const Integers subnormal = (Integers)(__builtin_convertvector(magnitude, Floats) * 0x1p-24f);
    const Integers infinite = (magnitude << 13) | 0x7f800000;
    const Integers finite = magnitude < 0x0400 ? subnormal : normal;
    const Integers not_finite = magnitude > 0x7c00 ? infinite | 0x00400000 : infinite;
    return (Floats)((Words)(magnitude < 0x7c00 ? finite : not_finite) | (bits & 0x8000) << 16);
  }

  // Rounds to nearest even. A NaN becomes quiet and keeps its upper bits.
  static Words rounded(Floats floats) {
    const Integers magnitude = (Integers)floats & 0x7fffffff;
    // The last bit of a number near 0.5 is the smallest float16, so that the addition rounds to a multiple of it.
    const Integers subnormal = (Integers)((Floats)magnitude + 0.5f) - 0x3f000000;
    const Integers odd = (magnitude >> 13) & 1;
    const Integers normal = (magnitude - ((127 - 15) << 23) + 0x0fff + odd) >> 13;  // may carry into infinity
    const Integers finite = magnitude < ((127 - 14) << 23) ? subnormal : normal;
    const Integers nan = ((magnitude >> 13) & 0x03ff) | 0x7e00;
    const Integers not_finite = magnitude > 0x7f800000 ? nan : (nan & 0) + 0x7c00;
    return (Words)(magnitude < ((127 + 16) << 23) ? finite : not_finite) | ((Words)floats & 0x80000000) >> 16;
  }
#endif
};

// Partial results of a 16-bit type: float32 numbers that are not rounded yet.
template <class Small>
struct PartialOf {
  using Value = float;
  using Accumulator = FloatPair;
  static constexpr size_t kBytes = 4;
  static constexpr size_t kItems = Small::kItems;

  static FloatPair load(const char* from) { return Small::load_floats(from); }
  static void store(char* to, FloatPair pair) { Small::store_floats(to, pair); }
};

}  // namespace
}  // namespace ronde::RONDE_ISA
