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

// Sums of a number of weights x shares in lanes: tree[n + i] is the sum of the lanes l with l % n = i.
struct LaneTree {
  float sums[2 * kLanes];
};

// Stores the products of each lane, cumulated, and sums them.
[[gnu::always_inline]] inline void multiply(const float* weights, const float* shares, size_t rows, float* cumulated,
                                            LaneTree& tree) {
  Vector<float> sums[kVectors<float>] = {};
  for (size_t row = 0; row < rows; ++row)
#pragma GCC unroll 4
    for (size_t v = 0; v < kVectors<float>; ++v) {
      const size_t place = row * kLanes + v * kItems<float>;
      sums[v] += load(weights + place) * load(shares + place);
      store(cumulated + place, sums[v]);
    }
  std::memcpy(tree.sums + kLanes, sums, sizeof sums);
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  Eight halves[2];
  std::memcpy(halves, sums, sizeof halves);
  const Eight eight = halves[0] + halves[1];
  std::memcpy(tree.sums + 8, &eight, sizeof eight);
  Four quarters[2];
  std::memcpy(quarters, &eight, sizeof quarters);
  const Four four = quarters[0] + quarters[1];
  std::memcpy(tree.sums + 4, &four, sizeof four);
  tree.sums[2] = four[0] + four[2];
  tree.sums[3] = four[1] + four[3];
  tree.sums[1] = tree.sums[2] + tree.sums[3];
}

// Lane l has the topics l, l + kLanes and so on. A draw chooses a lane by descending a tree of sums of lanes, and
// then the topic in the lane, without branches that a processor would have to guess. Several are made side by side,
// since each of these steps waits for the one before.
void draw_topics(TopicDrawing* drawings, size_t count, size_t rows, float* cumulated) {
  constexpr size_t kMost = 8;
  LaneTree trees[kMost];
  float left[kMost];
  size_t lanes[kMost];
  for (; count > kMost; drawings += kMost, count -= kMost) draw_topics(drawings, kMost, rows, cumulated);
  for (size_t d = 0; d < count; ++d) {
    multiply(drawings[d].weights, drawings[d].shares, rows, cumulated + d * rows * kLanes, trees[d]);
    drawings[d].mass = trees[d].sums[1];
    left[d] = drawings[d].uniform * drawings[d].mass;
    lanes[d] = 0;
  }
#pragma GCC unroll 4
  for (size_t width = 1; width < kLanes; width *= 2)
    for (size_t d = 0; d < count; ++d) {
      const float first = trees[d].sums[2 * width + lanes[d]];
      const int is_second = left[d] >= first;
      left[d] -= static_cast<float>(is_second) * first;  // a choice would become a branch
      lanes[d] += static_cast<size_t>(is_second) * width;
    }
  for (size_t d = 0; d < count; ++d) {
    const float* const own = cumulated + d * rows * kLanes + lanes[d];
    size_t row = 0;
    for (size_t i = 0; i < rows; ++i) row += own[i * kLanes] <= left[d] ? 1 : 0;
    drawings[d].topic = static_cast<uint32_t>(row * kLanes + lanes[d]);
  }
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
constinit const TopicKernels kTopicKernels = {draw_topics, dot, add_scaled};

}  // namespace ronde::RONDE_ISA
