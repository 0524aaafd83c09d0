#include "symmetric.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace ronde {

uint32_t SymmetricSegments::add(std::shared_ptr<Mapping> mapping, size_t part_bytes, int own) {
  std::lock_guard lock(mutex_);
  std::byte* own_part = mapping->data() + static_cast<size_t>(own) * part_bytes;
  segments_.push_back({next_, std::move(mapping), part_bytes, own_part});
  return next_++;
}

void SymmetricSegments::drop(uint32_t number) {
  if (is_inherited()) return;
  std::lock_guard lock(mutex_);
  std::erase_if(segments_, [number](const Segment& segment) { return segment.number == number; });
}

std::byte* SymmetricSegments::own_part(uint32_t number) const {
  std::lock_guard lock(mutex_);
  return find(number).own;
}

Place SymmetricSegments::place_of(const void* data, size_t bytes) const {
  std::lock_guard lock(mutex_);
  const auto address = reinterpret_cast<uintptr_t>(data);
  for (const Segment& segment : segments_) {
    const auto begin = reinterpret_cast<uintptr_t>(segment.own);
    if (address >= begin && address + bytes <= begin + segment.part_bytes) return {address - begin, segment.number};
  }
  return {};
}

std::byte* SymmetricSegments::resolve(const Place& place, int local) const {
  std::lock_guard lock(mutex_);
  const Segment& segment = find(place.segment);
  return segment.mapping->data() + static_cast<size_t>(local) * segment.part_bytes + place.offset;
}

const SymmetricSegments::Segment& SymmetricSegments::find(uint32_t number) const {
  const auto found = std::find_if(segments_.begin(), segments_.end(),
                                  [number](const Segment& segment) { return segment.number == number; });
  if (found == segments_.end()) throw std::logic_error("unknown symmetric segment");
  return *found;
}

}  // namespace ronde
