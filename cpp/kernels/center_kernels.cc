// The kernels of nearest_centers.h. CMake compiles them once for every instruction set, by the rules of
// reduce_kernels.cc.
//
// A tile is as many rows as kTileVectors vectors have elements. Its features are transposed, so that one vector holds a
// feature of several rows, and a distance needs no sum across a vector: each element of a vector takes the same steps
// in the same order, whatever the width.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/nearest_centers.h"
#include "kernels/reduce_elements.h"
#include "kernels/reduce_kernels.h"

namespace ronde::RONDE_ISA {

extern const CenterKernels kCenterKernels;

namespace {

constexpr int kTileVectors = 4;
constexpr int kCentersAtOnce = 2;       // their sums, a feature of the tile and a center fit into 16 registers
constexpr size_t kFeaturesAtOnce = 64;  // of a tile, in the first-level cache

template <class T>
struct IndexOf;
template <>
struct IndexOf<float> {
  using Type = int32_t;
};
template <>
struct IndexOf<double> {
  using Type = int64_t;
};

template <class T>
struct Tile {
  using Values = Vector<T>;
  using Indices = Vector<typename IndexOf<T>::Type>;
  static constexpr size_t kItems = kVectorBytes / sizeof(T);
  static constexpr size_t kRows = kTileVectors * kItems;

  Values features[kFeaturesAtOnce][kTileVectors];
  Values nearest[kTileVectors];  // squared distances
  Indices labels[kTileVectors];

  // Takes `count` features of up to kRows rows, from the given one on. The last row stands for rows that are missing.
  void load(const T* rows, size_t row_count, size_t dimensions, size_t first, size_t count) {
    for (int v = 0; v < kTileVectors; ++v) {
      const T* row[kItems];
      for (size_t i = 0; i < kItems; ++i) {
        const size_t number = v * kItems + i;
        row[i] = rows + (number < row_count ? number : row_count - 1) * dimensions + first;
      }
      for (size_t j = 0; j < count; ++j) {
        T values[kItems];
        for (size_t i = 0; i < kItems; ++i) values[i] = row[i][j];
        std::memcpy(&features[j][v], values, sizeof values);
      }
    }
  }

  // Adds the features' part of the squared distances to kCenters centers that follow each other in memory.
  template <int kCenters>
  [[gnu::always_inline]] inline void add_distances(const T* centers, size_t dimensions, size_t count,
                                                   Values (&sums)[kCenters][kTileVectors]) const {
    for (size_t j = 0; j < count; ++j) {
#pragma GCC unroll 4
      for (int c = 0; c < kCenters; ++c) {
        const T center = centers[c * dimensions + j];
#pragma GCC unroll 4
        for (int v = 0; v < kTileVectors; ++v) {
          const Values difference = features[j][v] - center;
          sums[c][v] += difference * difference;
        }
      }
    }
  }

  // Of equally near centers the first stays.
  [[gnu::always_inline]] inline void offer(size_t center, const Values (&distances)[kTileVectors]) {
    const auto number = static_cast<typename IndexOf<T>::Type>(center);
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      if (center == 0) {
        nearest[v] = distances[v];
        labels[v] = Indices{};
      } else {
        const Indices is_nearer = distances[v] < nearest[v];
        nearest[v] = is_nearer ? distances[v] : nearest[v];
        labels[v] = is_nearer ? Indices{} + number : labels[v];
      }
    }
  }
};

// Adds the features [first, first + count) to the distances of kCenters centers from the given one on. `partial`: the
// distances between calls, for each center.
template <class T, int kCenters>
[[gnu::always_inline]] inline void extend(Tile<T>& tile, const CenterAssignment& all, size_t center, size_t first,
                                          size_t count, Vector<T>* partial) {
  Vector<T> sums[kCenters][kTileVectors] = {};
  Vector<T>* const own = partial + center * kTileVectors;
  if (first > 0) std::memcpy(sums, own, sizeof sums);
  tile.add_distances(static_cast<const T*>(all.centers) + center * all.dimensions + first, all.dimensions, count, sums);
  if (first + count < all.dimensions) {
    std::memcpy(own, sums, sizeof sums);
  } else {
    for (int c = 0; c < kCenters; ++c) tile.offer(center + c, sums[c]);
  }
}

template <class T>
void find_nearest(Tile<T>& tile, const CenterAssignment& all, const T* rows, size_t row_count, Vector<T>* partial) {
  for (size_t first = 0; first < all.dimensions; first += kFeaturesAtOnce) {
    const size_t left = all.dimensions - first;
    const size_t count = left < kFeaturesAtOnce ? left : kFeaturesAtOnce;
    tile.load(rows, row_count, all.dimensions, first, count);
    size_t center = 0;
    for (; center + kCentersAtOnce <= all.center_count; center += kCentersAtOnce) {
      extend<T, kCentersAtOnce>(tile, all, center, first, count, partial);
    }
    for (; center < all.center_count; ++center) extend<T, 1>(tile, all, center, first, count, partial);
  }
}

template <class T>
void add_row(double* __restrict sums, const T* __restrict row, size_t dimensions, double weight) {
  for (size_t j = 0; j < dimensions; ++j) sums[j] += weight * static_cast<double>(row[j]);
  sums[dimensions] += weight;
}

template <class T>
double assign(const CenterAssignment& all, void* scratch) {
  double inertia = 0;
  Tile<T> tile;
  const T* rows = static_cast<const T*>(all.rows);
  for (size_t first = 0; first < all.row_count; first += Tile<T>::kRows, rows += Tile<T>::kRows * all.dimensions) {
    const size_t left = all.row_count - first;
    const size_t count = left < Tile<T>::kRows ? left : Tile<T>::kRows;
    find_nearest(tile, all, rows, count, static_cast<Vector<T>*>(scratch));
    T nearest[Tile<T>::kRows];
    typename IndexOf<T>::Type labels[Tile<T>::kRows];
    std::memcpy(nearest, tile.nearest, sizeof nearest);
    std::memcpy(labels, tile.labels, sizeof labels);
    for (size_t i = 0; i < count; ++i) {
      const double weight = all.weights == nullptr ? 1 : all.weights[first + i];
      const auto distance = static_cast<double>(nearest[i]);
      inertia += weight * distance;
      if (all.labels != nullptr) all.labels[first + i] = static_cast<int32_t>(labels[i]);
      if (all.squared_distances != nullptr) all.squared_distances[first + i] = distance;
      if (all.sums != nullptr) {
        add_row(all.sums + static_cast<size_t>(labels[i]) * (all.dimensions + 1), rows + i * all.dimensions,
                all.dimensions, weight);
      }
    }
  }
  return inertia;
}

}  // namespace

extern constinit const CenterKernels kCenterKernels;
constinit const CenterKernels kCenterKernels = {assign<float>, assign<double>, kTileVectors * kVectorBytes};

}  // namespace ronde::RONDE_ISA
