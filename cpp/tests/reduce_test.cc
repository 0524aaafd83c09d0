// Compares every kernel of every instruction set of this machine with a plain scalar computation.
#include "kernels/reduce.h"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "kernels/reduce_kernels.h"
#include "reduce_reference.h"

namespace ronde {
namespace {

// --- Inputs ---------------------------------------------------------------------------------------------------------

std::mt19937_64 generator(20240607);

// Half of the numbers are of magnitude 1, the others have random bits: infinities, NaN, subnormals.
template <class T>
T random_element() {
  const uint64_t random = generator();
  if constexpr (kIsComplex<T>) {
    using Part = typename T::value_type;
    return {random_element<Part>(), random_element<Part>()};
  } else if constexpr (kIsInteger<T>) {
    return static_cast<T>(random);
  } else if constexpr (std::is_same_v<T, Truth>) {
    return std::bit_cast<Truth>(static_cast<uint8_t>(random & 1 ? random >> 8 : 0));
  } else {
    if (random & 1) return static_cast<T>(static_cast<float>(static_cast<int32_t>(random >> 32)) * 0x1p-29f);
    const uint64_t bits = generator();
    T element;
    std::memcpy(&element, &bits, sizeof element);
    return element;
  }
}

Bytes random_bytes(DType dtype, size_t count) {
  return with_type(dtype, [&](auto type) {
    using T = decltype(type);
    Bytes bytes(count * sizeof(T));
    for (size_t i = 0; i < count; ++i) {
      const T element = random_element<T>();
      std::memcpy(&bytes[i * sizeof(T)], &element, sizeof element);
    }
    return bytes;
  });
}

std::string describe(const Kernels& kernels, DType dtype, ReduceOp op, size_t count, int source_count) {
  return std::string(kernels.instruction_set) + " " + name_of(op) + " of " + std::to_string(source_count) + " x " +
         std::to_string(count) + " " + name_of(dtype);
}

// Buffer b's contents start at byte `skew + b` of an allocation that ends with them, so that AddressSanitizer detects
// accesses behind them.
struct Buffers {
  Buffers(const std::vector<Bytes>& contents, size_t skew) : skew(skew) {
    for (const Bytes& bytes : contents) {
      Bytes buffer(skew + buffers.size());
      buffer.insert(buffer.end(), bytes.begin(), bytes.end());
      buffer.shrink_to_fit();
      buffers.push_back(std::move(buffer));
    }
  }
  char* operator[](size_t index) { return buffers[index].data() + skew + index; }

  size_t skew;
  std::vector<Bytes> buffers;
};

// Reduces the sources into the buffers destinations[d]: a number below source_count is a source, others are separate
// buffers.
void check_reduction(const Kernels& kernels, DType dtype, ReduceOp op, const std::vector<Bytes>& sources,
                     const Bytes& expected, const std::vector<int>& destinations, size_t skew) {
  const int source_count = static_cast<int>(sources.size());
  const size_t count = expected.size() / size_of(dtype);
  std::vector<Bytes> contents = sources;
  contents.resize(sources.size() + destinations.size(), Bytes(expected.size(), 0x55));
  Buffers buffers(contents, skew);
  std::vector<const void*> from;
  for (int source = 0; source < source_count; ++source) from.push_back(buffers[source]);
  std::vector<void*> to;
  for (const int destination : destinations) to.push_back(buffers[destination]);
  kernels.table[static_cast<int>(dtype)][static_cast<int>(op)](to.data(), static_cast<int>(to.size()), from.data(),
                                                               source_count, count, source_count);
  for (const int destination : destinations) {
    if (same(dtype, buffers[destination], expected.data(), expected.size())) contents[destination].clear();
    if (!contents[destination].empty() && count > 0) {
      std::fprintf(stderr, "%s, destination %d: wrong\n", describe(kernels, dtype, op, count, source_count).c_str(),
                   destination);
      std::exit(1);
    }
  }
  for (int source = 0; source < source_count; ++source) {  // sources that are not destinations do not change
    if (!contents[source].empty()) CHECK(std::memcmp(buffers[source], contents[source].data(), expected.size()) == 0);
  }
}

// No destination is a source; one is; two are, the first and the last; all are.
std::vector<std::vector<int>> destination_choices(int source_count) {
  std::vector<std::vector<int>> choices = {{source_count}, {source_count - 1, source_count, source_count + 1}};
  std::vector<int> all;
  for (int source = 0; source < source_count; ++source) {
    choices.push_back({source});
    all.push_back(source);
  }
  choices.push_back(all);
  if (source_count > 1) choices.push_back({source_count - 1, 0});
  return choices;
}

// More sources than the kernels read together, and more elements than they do in one go.
void test_many_sources() {
  for (int dtype_number = 0; dtype_number < kDTypeCount; ++dtype_number) {
    const DType dtype = static_cast<DType>(dtype_number);
    for (const size_t count : {65, 5000}) {
      std::vector<Bytes> sources;
      for (const int source_count : {8, 9, 17}) {
        while (static_cast<int>(sources.size()) < source_count) sources.push_back(random_bytes(dtype, count));
        std::vector<int> all(static_cast<size_t>(source_count));
        std::iota(all.begin(), all.end(), 0);
        for (int op_number = 0; op_number < kReduceOpCount; ++op_number) {
          const ReduceOp op = static_cast<ReduceOp>(op_number);
          if (!is_supported(dtype, op)) continue;
          const Bytes expected = expected_of(dtype, op, sources, source_count);
          for (const Kernels* kernels : available_kernels()) {
            check_reduction(*kernels, dtype, op, sources, expected, {source_count}, 1);
            check_reduction(*kernels, dtype, op, sources, expected, all, 3);
          }
        }
      }
    }
  }
}

void test_all_kernels() {
  for (int dtype_number = 0; dtype_number < kDTypeCount; ++dtype_number) {
    const DType dtype = static_cast<DType>(dtype_number);
    for (const size_t count : {0, 1, 3, 7, 8, 15, 16, 17, 63, 64, 65, 1000, 4097}) {
      std::vector<Bytes> sources;
      for (int source_count = 1; source_count <= 5; ++source_count) {
        sources.push_back(random_bytes(dtype, count));
        for (int op_number = 0; op_number < kReduceOpCount; ++op_number) {
          const ReduceOp op = static_cast<ReduceOp>(op_number);
          if (!is_supported(dtype, op)) continue;
          const Bytes expected = expected_of(dtype, op, sources, source_count);
          size_t skew = 0;
          for (const std::vector<int>& destinations : destination_choices(source_count)) {
            for (const Kernels* kernels : available_kernels()) {
              check_reduction(*kernels, dtype, op, sources, expected, destinations, skew++ % 5);
            }
          }
        }
      }
    }
  }
}

// Zeros of either sign in all orders, and in all places of a vector: the greatest has the sign that all have, the least
// one that any has.
void test_signed_zeros() {
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64}) {
    const size_t bytes = size_of(dtype);
    for (const size_t count : {1, 63, 64, 519}) {
      for (int signs = 0; signs < 8; ++signs) {
        Bytes zero(count * bytes), negative(count * bytes);
        for (size_t i = 0; i < count; ++i) negative[(i + 1) * bytes - 1] = static_cast<char>(0x80);
        std::vector<Bytes> sources;
        for (int source = 0; source < 3; ++source) sources.push_back(signs >> source & 1 ? negative : zero);
        for (const Kernels* kernels : available_kernels()) {
          check_reduction(*kernels, dtype, ReduceOp::kMax, sources, signs == 7 ? negative : zero, {3}, 1);
          check_reduction(*kernels, dtype, ReduceOp::kMin, sources, signs == 0 ? zero : negative, {3}, 1);
        }
      }
    }
  }
}

// --- 16-bit floats --------------------------------------------------------------------------------------------------

Bytes bytes_of(const std::vector<uint16_t>& numbers) {
  Bytes bytes(numbers.size() * 2);
  std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

// All 65536 numbers: loaded and stored unchanged (except that a NaN becomes quiet); combined with others and divided.
void test_every_small_float(DType dtype, int infinity, int quiet) {
  std::vector<uint16_t> every(65536), unchanged(65536);
  for (int bits = 0; bits < 65536; ++bits) {
    every[bits] = static_cast<uint16_t>(bits);
    unchanged[bits] = static_cast<uint16_t>((bits & 0x7fff) > infinity ? bits | quiet : bits);
  }
  for (const Kernels* kernels : available_kernels()) {
    std::vector<uint16_t> result(65536);
    void* to = result.data();
    const void* from = every.data();
    kernels->table[static_cast<int>(dtype)][static_cast<int>(ReduceOp::kSum)](&to, 1, &from, 1, 65536, 1);
    CHECK(result == unchanged);
    for (int divisor : {1, 2, 3, 7, 1024, 65521}) {
      const Bytes expected = expected_of(dtype, ReduceOp::kAverage, {bytes_of(every)}, divisor);
      kernels->table[static_cast<int>(dtype)][static_cast<int>(ReduceOp::kAverage)](&to, 1, &from, 1, 65536, divisor);
      CHECK(same(dtype, bytes_of(result).data(), expected.data(), expected.size()));
    }
  }
  for (const int other_of : {1, 257, 4099, 32771, 64037}) {  // odd, so that every number occurs as the other
    std::vector<uint16_t> others(65536);
    for (int bits = 0; bits < 65536; ++bits) others[bits] = static_cast<uint16_t>(bits * other_of + other_of);
    const std::vector<Bytes> sources = {bytes_of(every), bytes_of(others)};
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
      const Bytes expected = expected_of(dtype, op, sources, 2);
      for (const Kernels* kernels : available_kernels()) {
        check_reduction(*kernels, dtype, op, sources, expected, {2}, 0);
      }
    }
  }
}

uint16_t sum_of(const Kernels& kernels, DType dtype, std::vector<uint16_t> numbers) {
  uint16_t result = 0;
  void* to = &result;
  std::vector<const void*> from;
  for (const uint16_t& number : numbers) from.push_back(&number);
  kernels.table[static_cast<int>(dtype)][static_cast<int>(ReduceOp::kSum)](&to, 1, from.data(),
                                                                           static_cast<int>(from.size()), 1, 1);
  return result;
}

// Numbers computed by hand, in case the reference has the same error as the kernels.
void test_small_float_rounding() {
  for (const Kernels* kernels : available_kernels()) {
    const auto half = [&](std::vector<uint16_t> numbers) { return sum_of(*kernels, DType::kFloat16, numbers); };
    CHECK(half({0x3c00, 0x1000}) == 0x3c00);             // 1 + 2^-11: a tie, down to even
    CHECK(half({0x3c01, 0x1000}) == 0x3c02);             // 1 + 2^-10 + 2^-11: a tie, up to even
    CHECK(half({0x3c00, 0x1001}) == 0x3c01);             // a little more than a tie
    CHECK(half({0x6800, 0x3c00, 0x3c00}) == 0x6801);     // 2048 + 1 + 1 = 2050: accumulated in float32
    CHECK(half({0x7bff, 0x4c00}) == 0x7c00);             // 65504 + 16: a tie, up to infinity
    CHECK(half({0x7bff, 0x4bff}) == 0x7bff);             // a little less stays finite
    CHECK(half({0x7bff, 0x7bff, 0xfbff}) == 0x7bff);     // 65504 + 65504 - 65504: float32 does not overflow
    CHECK(half({0x0001, 0x0001}) == 0x0002);             // subnormal
    CHECK(half({0x03ff, 0x0001}) == 0x0400);             // subnormal + subnormal = the least normal
    CHECK(half({0x8000, 0x8000}) == 0x8000);             // -0
    CHECK((half({0x7c00, 0xfc00}) & 0x7fff) == 0x7e00);  // infinity - infinity
    const auto brain = [&](std::vector<uint16_t> numbers) { return sum_of(*kernels, DType::kBfloat16, numbers); };
    CHECK(brain({0x3f80, 0x3b80}) == 0x3f80);             // 1 + 2^-8: a tie, down to even
    CHECK(brain({0x3f81, 0x3b80}) == 0x3f82);             // a tie, up to even
    CHECK(brain({0x4380, 0x3f80, 0x3f80}) == 0x4381);     // 256 + 1 + 1 = 258
    CHECK(brain({0x7f7f, 0x7f7f}) == 0x7f80);             // overflow
    CHECK(brain({0x0001, 0x0001}) == 0x0002);             // subnormal
    CHECK((brain({0x7f80, 0xff80}) & 0x7fff) == 0x7fc0);  // infinity - infinity
  }
}

// Partial sums between the stages of a reduction: float32 sums of 16-bit floats, rounded when they are complete.
void test_partial_sums(DType dtype) {
  const DType wide = DType::kFloat32;
  for (const size_t count : {0, 1, 7, 15, 16, 31, 32, 33, 100, 1001}) {
    std::vector<Bytes> sources;
    std::vector<const void*> all;
    for (int source = 0; source < 5; ++source) sources.push_back(random_bytes(dtype, count));
    for (const Bytes& source : sources) all.push_back(source.data());
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kProduct}) {
      const ReduceOp part = op == ReduceOp::kAverage ? ReduceOp::kSum : op;
      const Bytes expected = expected_of(dtype, op, sources, 5);
      for (const Kernels* kernels : available_kernels()) {
        // Two sources, then the others one by one, in rank order: the same bits as all at once.
        Bytes sum(count * size_of(wide)), next(sum.size()), result(count * size_of(dtype));
        void* to = sum.data();
        const int row = static_cast<int>(dtype);
        kernels->widening[row][static_cast<int>(part)](&to, 1, all.data(), 2, count, 1);
        for (int source = 2; source < 5; ++source) {
          to = next.data();
          kernels->widening[row][static_cast<int>(ReduceOp::kSum)](&to, 1, &all[source], 1, count, 1);
          const bool is_last = source == 4;
          const void* both[] = {sum.data(), next.data()};
          to = is_last ? result.data() : sum.data();
          const Kernel combine = is_last ? kernels->narrowing[row][static_cast<int>(op)]
                                         : kernels->table[static_cast<int>(wide)][static_cast<int>(part)];
          combine(&to, 1, both, 2, count, 5);
        }
        CHECK(same(dtype, result.data(), expected.data(), expected.size()));
      }
    }
  }
}

// --- The public functions -------------------------------------------------------------------------------------------

void test_supported() {
  for (int number = 0; number < kDTypeCount; ++number) {
    const DType dtype = static_cast<DType>(number);
    const bool is_integer = dtype <= DType::kInt64;  // or bool
    const bool is_complex = dtype >= DType::kComplex64;
    CHECK(is_supported(dtype, ReduceOp::kSum) && is_supported(dtype, ReduceOp::kProduct));
    CHECK(is_supported(dtype, ReduceOp::kAverage) == (dtype != DType::kBool));
    CHECK(is_supported(dtype, ReduceOp::kMin) == !is_complex);
    CHECK(is_supported(dtype, ReduceOp::kMax) == !is_complex);
    CHECK(is_supported(dtype, ReduceOp::kBitAnd) == is_integer);
    CHECK(is_supported(dtype, ReduceOp::kBitOr) == is_integer);
    CHECK(is_supported(dtype, ReduceOp::kBitXor) == is_integer);
  }
  CHECK(!is_supported(static_cast<DType>(kDTypeCount), ReduceOp::kSum));
  CHECK(!is_supported(DType::kFloat32, static_cast<ReduceOp>(kReduceOpCount)));
  float number = 1;
  const void* source = &number;
  CHECK_THROWS(reduce({DType::kFloat32, ReduceOp::kBitOr, 1}, &number, &source, 1, 1), UsageError);
}

void test_public_functions() {
  std::vector<float> a = {1, 2, std::numeric_limits<float>::quiet_NaN(), 4, 5};
  std::vector<float> b = {10, 20, 30, std::numeric_limits<float>::quiet_NaN(), 50};
  const void* sources[] = {a.data(), b.data()};
  std::vector<float> result(5);
  reduce({DType::kFloat32, ReduceOp::kMax, 2}, result.data(), sources, 2, 5);
  CHECK(result[0] == 10 && result[4] == 50 && std::isnan(result[2]) && std::isnan(result[3]));
  void* both[] = {b.data(), a.data()};
  reduce_to_all({DType::kFloat32, ReduceOp::kAverage, 4}, both, 2, sources, 2, 5);
  CHECK(a[0] == 2.75f && b[0] == 2.75f && a[4] == 13.75f && b[4] == 13.75f);
}

// More than 2^32 elements, in a few MiB of memory: one piece mapped repeatedly, and a separate one at the end.
void test_huge_count() {
  constexpr size_t kPieceBytes = size_t{4} << 20;
  constexpr size_t kPieces = (size_t{1} << 32) / kPieceBytes;
  const int file = memfd_create("ronde-test", MFD_CLOEXEC);
  CHECK(file >= 0 && ftruncate(file, 2 * kPieceBytes) == 0);
  const size_t bytes = (kPieces + 1) * kPieceBytes;
  void* reserved = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(reserved != MAP_FAILED);
  uint8_t* numbers = static_cast<uint8_t*>(reserved);
  for (size_t piece = 0; piece <= kPieces; ++piece) {
    CHECK(mmap(numbers + piece * kPieceBytes, kPieceBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
               piece == kPieces ? kPieceBytes : 0) != MAP_FAILED);
  }
  const size_t count = kPieces * kPieceBytes + 1001;
  numbers[count - 1] = 7;
  numbers[count] = 7;
  const void* sources[] = {numbers, numbers};
  reduce({DType::kUint8, ReduceOp::kSum, 1}, numbers, sources, 2, count);
  CHECK(numbers[count - 1] == 14 && numbers[count] == 7);
  munmap(reserved, bytes);
  close(file);
}

}  // namespace
}  // namespace ronde

int main() {
  ronde::test_supported();
  ronde::test_public_functions();
  ronde::test_small_float_rounding();
  ronde::test_every_small_float(ronde::DType::kFloat16, 0x7c00, 0x0200);
  ronde::test_every_small_float(ronde::DType::kBfloat16, 0x7f80, 0x0040);
  ronde::test_partial_sums(ronde::DType::kFloat16);
  ronde::test_partial_sums(ronde::DType::kBfloat16);
  ronde::test_all_kernels();
  ronde::test_many_sources();
  ronde::test_signed_zeros();
  ronde::test_huge_count();
}
