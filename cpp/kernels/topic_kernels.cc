// The kernels of topic_sampler.h and topic_inference.h. CMake compiles them once for every instruction set, by the
// rules of reduce_kernels.cc.
//
// Sums are kept in kLanes lanes, whatever the width of a vector, so that all instruction sets add in the same order.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/reduce_elements.h"
#include "kernels/reduce_kernels.h"

namespace ronde::RONDE_ISA {

extern const TopicKernels kTopicKernels;

namespace {

constexpr size_t kLanes = kTopicLanes;

template <class T>
constexpr size_t kItems = kVectorBytes / sizeof(T);
template <class T>
constexpr size_t kVectors = kLanes / kItems<T>;  // of all lanes

template <class T>
[[gnu::always_inline]] inline Vector<T> load(const T* from) {
  return load_vector<Vector<T>>(reinterpret_cast<const char*>(from));
}

template <class T>
[[gnu::always_inline]] inline void store(T* to, Vector<T> vector) {
  store_vector(reinterpret_cast<char*>(to), vector);
}

// Lane l has the topics l, l + kLanes and so on. The draw chooses a lane by descending a tree of sums of lanes, and
// then the topic in the lane, without branches that a processor would have to guess.
uint32_t draw_topic(const float* weights, const float* shares, size_t rows, float uniform, float* cumulated,
                    float* mass) {
  Vector<float> sums[kVectors<float>] = {};
  for (size_t row = 0; row < rows; ++row)
#pragma GCC unroll 4
    for (size_t v = 0; v < kVectors<float>; ++v) {
      const size_t place = row * kLanes + v * kItems<float>;
      sums[v] += load(weights + place) * load(shares + place);
      store(cumulated + place, sums[v]);
    }
  float tree[2 * kLanes];  // node n is the sum of nodes 2n and 2n + 1
  std::memcpy(tree + kLanes, sums, sizeof sums);
#pragma GCC unroll 16
  for (size_t node = kLanes - 1; node > 0; --node) tree[node] = tree[2 * node] + tree[2 * node + 1];
  *mass = tree[1];
  float left = uniform * tree[1];
  size_t node = 1;
#pragma GCC unroll 4
  for (size_t width = kLanes; width > 1; width /= 2) {
    const float first = tree[2 * node];
    const int is_second = left >= first;
    left -= static_cast<float>(is_second) * first;  // a choice would become a branch
    node = 2 * node + static_cast<size_t>(is_second);
  }
  const size_t lane = node - kLanes;
  size_t row = 0;
  for (size_t i = 0; i < rows; ++i) row += cumulated[i * kLanes + lane] <= left ? 1 : 0;
  return static_cast<uint32_t>(row * kLanes + lane);
}

double dot(const double* a, const double* b, size_t rows) {
  Vector<double> sums[kVectors<double>] = {};
  for (size_t row = 0; row < rows; ++row)
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors<double>; ++v) {
      const size_t place = row * kLanes + v * kItems<double>;
      sums[v] += load(a + place) * load(b + place);
    }
  double lanes[kLanes];
  std::memcpy(lanes, sums, sizeof lanes);
  for (size_t width = kLanes / 2; width > 0; width /= 2)
    for (size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

void add_scaled(double* sums, const double* a, double factor, size_t rows) {
  for (size_t place = 0; place < rows * kLanes; place += kItems<double>)
    store(sums + place, load(sums + place) + load(a + place) * factor);
}

}  // namespace

extern constinit const TopicKernels kTopicKernels;
constinit const TopicKernels kTopicKernels = {draw_topic, dot, add_scaled};

}  // namespace ronde::RONDE_ISA
