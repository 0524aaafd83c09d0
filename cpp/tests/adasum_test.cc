// Adasum against its formula in plain loops: the kernels, over links, in one host, and over several.
#include "algorithms/adasum.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "algorithms/adasum_vectors.h"
#include "base/error.h"
#include "kernels/reduce.h"
#include "kernels/reduce_kernels.h"
#include "rank_communicators.h"
#include "rank_threads.h"
#include "reduce_reference.h"

using namespace ronde;
using namespace ronde::testing;

namespace {

using Numbers = std::vector<double>;
using Counts = std::vector<size_t>;

constexpr DType kDTypes[] = {DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64};

size_t total_of(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), size_t{0}); }

Bytes encoded(DType dtype, const Numbers& numbers) {
  Bytes bytes(numbers.size() * size_of(dtype));
  for (size_t i = 0; i < numbers.size(); ++i) {
    char* const to = bytes.data() + i * size_of(dtype);
    if (dtype == DType::kFloat64) {
      std::memcpy(to, &numbers[i], sizeof numbers[i]);
      continue;
    }
    const auto number = static_cast<float>(numbers[i]);
    const uint16_t bits = dtype == DType::kFloat16 ? Half(number).bits : Brain(number).bits;
    std::memcpy(to, dtype == DType::kFloat32 ? static_cast<const void*>(&number) : &bits, size_of(dtype));
  }
  return bytes;
}

Numbers decoded(DType dtype, const Bytes& bytes) {
  Numbers numbers(bytes.size() / size_of(dtype));
  for (size_t i = 0; i < numbers.size(); ++i) {
    const char* const from = bytes.data() + i * size_of(dtype);
    float number = 0;
    uint16_t bits = 0;
    std::memcpy(&bits, from, sizeof bits);
    if (dtype == DType::kFloat64) {
      std::memcpy(&numbers[i], from, sizeof numbers[i]);
      continue;
    }
    if (dtype == DType::kFloat32) std::memcpy(&number, from, sizeof number);
    if (dtype == DType::kFloat16) number = std::bit_cast<Half>(bits);
    if (dtype == DType::kBfloat16) number = std::bit_cast<Brain>(bits);
    numbers[i] = number;
  }
  return numbers;
}

// One rank's input: vectors of different lengths, some of which are nearly parallel on all ranks. Every fifth rank
// passes zeros.
Numbers values_of(DType dtype, int rank, size_t count) {
  Numbers numbers(count);
  for (size_t i = 0; i < count; ++i) {
    const double own = static_cast<double>((i * 2654435761u + static_cast<unsigned>(rank) * 40503u) % 509) / 254 - 1;
    const double common = static_cast<double>(i * 40503u % 251) / 125 - 1;
    numbers[i] = rank % 5 == 4 ? 0 : (rank + 1) * common + own;
  }
  return decoded(dtype, encoded(dtype, numbers));
}

// --- The formula ----------------------------------------------------------------------------------------------------

Numbers combined(const Numbers& a, const Numbers& b) {
  const double aa = std::inner_product(a.begin(), a.end(), a.begin(), 0.0);
  const double ab = std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  const double bb = std::inner_product(b.begin(), b.end(), b.begin(), 0.0);
  const double weight_a = aa == 0 ? 1 : 1 - ab / (2 * aa), weight_b = bb == 0 ? 1 : 1 - ab / (2 * bb);
  Numbers result(a.size());
  for (size_t i = 0; i < a.size(); ++i) result[i] = weight_a * a[i] + weight_b * b[i];
  return result;
}

Numbers combined(std::vector<Numbers> vectors) {
  while (vectors.size() > 1) {
    for (size_t i = 0; i < vectors.size() / 2; ++i) vectors[i] = combined(vectors[2 * i], vectors[2 * i + 1]);
    vectors.resize(vectors.size() / 2);
  }
  return vectors.front();
}

// The result for the buffers of all parties, each vector separately.
Numbers expected_of(const std::vector<Numbers>& buffers, const Counts& counts) {
  Numbers result;
  for (const size_t count : counts) {
    std::vector<Numbers> vectors;
    for (const Numbers& buffer : buffers) {
      const auto begin = buffer.begin() + static_cast<std::ptrdiff_t>(result.size());
      vectors.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(count));
    }
    const Numbers vector = combined(vectors);
    result.insert(result.end(), vector.begin(), vector.end());
  }
  return result;
}

double tolerance(DType dtype) {
  if (dtype == DType::kFloat64) return 1e-12;
  return dtype == DType::kFloat32 ? 1e-5 : dtype == DType::kFloat16 ? 1e-2 : 8e-2;
}

bool close_to(DType dtype, const Bytes& result, const Numbers& expected) {
  const Numbers numbers = decoded(dtype, result);
  double largest = 1;
  for (const double number : expected) largest = std::max(largest, std::abs(number));
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!(std::abs(numbers[i] - expected[i]) <= tolerance(dtype) * largest)) {
      std::fprintf(stderr, "%s, element %zu of %zu: %g instead of %g\n", name_of(dtype), i, expected.size(), numbers[i],
                   expected[i]);
      return false;
    }
  }
  return numbers.size() == expected.size();
}

// --- Kernels --------------------------------------------------------------------------------------------------------

void check_kernels() {
  for (const DType dtype : kDTypes) {
    const int row = static_cast<int>(dtype);
    for (const size_t count : {0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 1000, 4099}) {
      const Numbers a = values_of(dtype, 0, count), b = values_of(dtype, 1, count);
      const Bytes first = encoded(dtype, a), second = encoded(dtype, b);
      const double expected[] = {1 + std::inner_product(a.begin(), a.end(), a.begin(), 0.0),
                                 2 + std::inner_product(a.begin(), a.end(), b.begin(), 0.0),
                                 3 + std::inner_product(b.begin(), b.end(), b.begin(), 0.0)};
      Numbers sum(count), same_products;
      for (size_t i = 0; i < count; ++i) sum[i] = 0.25 * a[i] + 1.5 * b[i];
      Bytes same_sum;
      for (const Kernels* kernels : available_kernels()) {
        for (size_t skew = 0; skew < 3; ++skew) {
          Bytes skewed(skew);
          skewed.insert(skewed.end(), first.begin(), first.end());
          skewed.shrink_to_fit();
          Numbers products = {1, 2, 3};
          kernels->adasum->dot[row](skewed.data() + skew, second.data(), count, products.data());
          for (int i = 0; i < 3; ++i) CHECK(std::abs(products[i] - expected[i]) <= 1e-12 * (count + expected[i]));
          if (same_products.empty()) same_products = products;
          CHECK(products == same_products);  // equal for all instruction sets

          kernels->adasum->weighted_sum[row](skewed.data() + skew, skewed.data() + skew, 0.25, second.data(), 1.5,
                                             count);
          const Bytes result(skewed.begin() + static_cast<std::ptrdiff_t>(skew), skewed.end());
          CHECK(close_to(dtype, result, sum));
          if (same_sum.empty()) same_sum = result;
          CHECK(result == same_sum);
        }
      }
    }
  }
  CHECK(!has_dot_products(DType::kInt32) && !has_dot_products(DType::kComplex64) && !has_dot_products(DType::kBool));
}

// More than 2^31 elements, in a few MiB of memory that is mapped repeatedly.
void check_huge_count() {
  constexpr size_t kPieceBytes = size_t{4} << 20;
  constexpr size_t kPieces = (size_t{1} << 32) / kPieceBytes + 1;
  const int file = memfd_create("ronde-test", MFD_CLOEXEC);
  CHECK(file >= 0 && ftruncate(file, kPieceBytes) == 0);
  void* const reserved =
      mmap(nullptr, kPieces * kPieceBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(reserved != MAP_FAILED);
  auto* const bytes = static_cast<std::byte*>(reserved);
  for (size_t piece = 0; piece < kPieces; ++piece) {
    CHECK(mmap(bytes + piece * kPieceBytes, kPieceBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) !=
          MAP_FAILED);
  }
  const Brain two(2.0f);
  std::memcpy(bytes, &two.bits, sizeof two.bits);  // the first of each piece; all others are zero
  const size_t count = (kPieces - 1) * kPieceBytes / 2 + 1;
  double products[3] = {};
  add_dot_products(DType::kBfloat16, bytes, bytes, count, products);
  for (const double product : products) CHECK(product == 4.0 * kPieces);
  munmap(reserved, kPieces * kPieceBytes);
  close(file);
}

// The scales for two vectors, one with the number `a` and one of numbers `b`, from the products of their pieces.
std::vector<int> exponents_of(double a, double b) {
  const Counts counts{3};
  const Bytes first = encoded(DType::kFloat64, {0, a, 0}), second = encoded(DType::kFloat64, {b, b, b});
  const auto bytes = [](const Bytes& of) { return reinterpret_cast<const std::byte*>(of.data()); };
  const Vectors vectors(DType::kFloat64, counts);
  std::vector<double> products = vectors.no_products();
  vectors.add_products(bytes(first), bytes(second), {0, 3}, products);
  return exponents_for(DType::kFloat64, products);
}

void check_scales() {
  CHECK(exponents_of(1, 2).empty());
  CHECK(exponents_of(0, 1).empty() && exponents_of(1, 0).empty());  // zeros need no scale
  CHECK((exponents_of(1e-200, 1) == std::vector{600, 0}) && (exponents_of(1, 5e-324) == std::vector{0, 600}));
  CHECK((exponents_of(0, 1e200) == std::vector{0, -600}) && (exponents_of(1e200, 1e-200) == std::vector{-600, 600}));
}

// --- Over links -----------------------------------------------------------------------------------------------------

// Small enough to be gathered, or large enough for halving; with empty halves; with vectors that end inside a half.
const Counts kBuffers[] = {{0}, {1}, {1009}, {3, 0, 500, 64}, {100'003}, {1, 70'000, 0, 128, 64, 33'333, 2}};

std::vector<Numbers> values_of_all(DType dtype, int size, size_t count) {
  std::vector<Numbers> all;
  for (int rank = 0; rank < size; ++rank) all.push_back(values_of(dtype, rank, count));
  return all;
}

void check_over_links(Wire wire) {
  for (const int size : {1, 2, 4, 8}) {
    Ranks ranks(size, wire);
    for (const Counts& counts : kBuffers) {
      for (const DType dtype : kDTypes) {
        if (dtype != DType::kFloat32 && size == 8) continue;
        const size_t count = total_of(counts);
        const Numbers expected = expected_of(values_of_all(dtype, size, count), counts);
        std::vector<Bytes> results(static_cast<size_t>(size));
        ranks.run([&](Mesh& mesh) {
          Scratch scratch;
          const Call call{.count = count, .kind = Kind::kAllreduce, .dtype = dtype, .op = ReduceOp::kAdasum};
          const Bytes in = encoded(dtype, values_of(dtype, mesh.rank(), count));
          Bytes untouched = in, in_place = in, out(in.size());
          adasum(mesh, call, untouched.data(), out.data(), counts, scratch);
          adasum(mesh, call, in_place.data(), in_place.data(), counts, scratch);
          CHECK(out == in_place && untouched == in);
          results[static_cast<size_t>(mesh.rank())] = out;
        });
        for (const Bytes& result : results) CHECK(result == results[0] && close_to(dtype, result, expected));
      }
    }
  }
}

// --- Communicators --------------------------------------------------------------------------------------------------

// The average of each host's ranks, for the hierarchical variant.
std::vector<Numbers> averages(const std::vector<Numbers>& all, const std::vector<int>& host_of) {
  std::vector<Numbers> sums;
  Counts sizes;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto host = static_cast<size_t>(host_of[rank]);
    if (host == sums.size()) {
      sums.emplace_back(all[rank].size());
      sizes.push_back(0);
    }
    for (size_t i = 0; i < all[rank].size(); ++i) sums[host][i] += all[rank][i];
    ++sizes[host];
  }
  for (size_t host = 0; host < sums.size(); ++host) {
    for (double& number : sums[host]) number /= static_cast<double>(sizes[host]);
  }
  return sums;
}

void check_communicator(const std::vector<int>& host_of, bool hierarchical) {
  Options options;
  options.adasum_hierarchical = hierarchical;
  const int size = static_cast<int>(host_of.size());
  std::vector<std::vector<Bytes>> results(host_of.size());
  const auto each = [&](auto&& body) {
    for (const Counts& counts : kBuffers) {
      for (const DType dtype : {DType::kBfloat16, DType::kFloat32}) body(counts, dtype);
    }
  };
  testing::run(host_of, options, [&](Communicator& comm) {
    each([&](const Counts& counts, DType dtype) {
      const size_t count = total_of(counts);
      const Bytes in = encoded(dtype, values_of(dtype, comm.rank(), count));
      Bytes out(in.size()), in_place = in;
      comm.adasum(in.data(), out.data(), counts, dtype);
      comm.adasum(in_place.data(), in_place.data(), counts, dtype);
      CHECK(out == in_place && in == encoded(dtype, values_of(dtype, comm.rank(), count)));
      results[static_cast<size_t>(comm.rank())].push_back(out);
    });
  });
  size_t next = 0;
  each([&](const Counts& counts, DType dtype) {
    std::vector<Numbers> parties = values_of_all(dtype, size, total_of(counts));
    if (hierarchical) parties = averages(parties, host_of);
    const Numbers expected = expected_of(parties, counts);
    for (const auto& result : results) {
      CHECK(result[next] == results[0][next] && close_to(dtype, result[next], expected));
    }
    ++next;
  });
}

void check_refusals() {
  Options options;
  testing::run({0, 0, 1}, options, [](Communicator& comm) {
    float number = 1;
    const UsageError error =
        thrown_by<UsageError>([&] { comm.allreduce(&number, &number, 1, DType::kFloat32, ReduceOp::kAdasum); });
    CHECK(contains(error, "there must be 2, 4, 8 or another power of two of them, not 3"));
    comm.allreduce(&number, &number, 1, DType::kFloat32, ReduceOp::kSum);
    CHECK(number == 3);
  });
  options.adasum_hierarchical = true;
  testing::run({0, 0, 1, 2}, options, [](Communicator& comm) {
    float number = 1;
    const UsageError error =
        thrown_by<UsageError>([&] { comm.allreduce(&number, &number, 1, DType::kFloat32, ReduceOp::kAdasum); });
    CHECK(contains(error, "combines hosts in pairs") && contains(error, "not 3"));
    comm.barrier();
  });
  testing::run({0, 0}, {}, [](Communicator& comm) {
    int32_t number = 1;
    float real = 1;
    CHECK_THROWS(comm.allreduce(&number, &number, 1, DType::kInt32, ReduceOp::kAdasum), UsageError);
    CHECK_THROWS(comm.reduce(&real, &real, 1, DType::kFloat32, ReduceOp::kAdasum, 0), UsageError);
    comm.allreduce(&real, &real, 1, DType::kFloat32, ReduceOp::kAdasum);
    CHECK(real == 1);  // equal vectors: their mean
    // A mismatch of the calls is found before anything is combined.
    const ReduceOp op = comm.rank() == 0 ? ReduceOp::kAdasum : ReduceOp::kSum;
    std::vector<float> many(100'000, 1);
    CHECK_THROWS(comm.allreduce(many.data(), many.data(), many.size(), DType::kFloat32, op), MismatchError);
    comm.barrier();
  });
}

}  // namespace

int main() {
  check_kernels();
  check_scales();
#if !defined(__SANITIZE_THREAD__)  // which would need shadow memory for every byte
  check_huge_count();
#endif
  check_over_links(Wire::kUnix);
  check_over_links(Wire::kShm);
  for (const std::vector<int>& host_of : std::vector<std::vector<int>>{{0}, {0, 0}, {0, 0, 0, 0}, {0, 1}, {0, 0, 1, 2}})
    check_communicator(host_of, false);
  for (const std::vector<int>& host_of : std::vector<std::vector<int>>{
           {0, 0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 0, 0, 1}, {0, 0, 0, 1, 1, 1}, {0, 0, 1, 1, 2, 2, 3}})
    check_communicator(host_of, true);
  check_refusals();
}
