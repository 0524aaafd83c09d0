#include "host/symmetric.h"

#include <algorithm>
#include <stdexcept>
#include <string>
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
  for (Segment& segment : segments_) {
    if (segment.number == number) segment.is_dropped = true;
  }
  if (pins_ == 0) std::erase_if(segments_, [](const Segment& segment) { return segment.is_dropped; });
}

void SymmetricSegments::make_private(const Place& place, size_t bytes) const {
  std::lock_guard lock(mutex_);
  for (Segment& segment : segments_) {
    if (segment.number != place.segment) continue;
    segment.is_private = true;
    segment.mapping->make_private(segment.own + place.offset, bytes);
  }
}

void SymmetricSegments::pin() const {
  std::lock_guard lock(mutex_);
  ++pins_;
}

void SymmetricSegments::unpin() const {
  std::lock_guard lock(mutex_);
  if (--pins_ == 0) std::erase_if(segments_, [](const Segment& segment) { return segment.is_dropped; });
}

std::byte* SymmetricSegments::own_part(uint32_t number) const {
  std::lock_guard lock(mutex_);
  return find(number).own;
}

LiveSegments SymmetricSegments::live() const {
  std::lock_guard lock(mutex_);
  LiveSegments live{0, next_ - 1};
  for (const Segment& segment : segments_) {
    const uint32_t age = live.newest - segment.number;
    if (age < 64 && segment.is_usable()) live.bits |= uint64_t{1} << age;
  }
  return live;
}

Place SymmetricSegments::place_of(const void* data, size_t bytes) const {
  if (bytes == 0) return {0, Place::kNowhere};
  std::lock_guard lock(mutex_);
  const auto address = reinterpret_cast<uintptr_t>(data);
  for (const Segment& segment : segments_) {
    const auto begin = reinterpret_cast<uintptr_t>(segment.own);
    if (!segment.is_usable() || address < begin) continue;
    if (address + bytes <= begin + segment.part_bytes) return {address - begin, segment.number};
  }
  return {};
}

std::byte* SymmetricSegments::resolve(const Place& place, int local, size_t bytes) const {
  std::lock_guard lock(mutex_);
  const Segment& segment = find(place.segment);
  if (place.offset > segment.part_bytes || bytes > segment.part_bytes - place.offset) {
    throw std::out_of_range(std::to_string(bytes) + " bytes at " + std::to_string(place.offset) +
                            " do not lie in a part of " + std::to_string(segment.part_bytes) + " bytes");
  }
  return segment.mapping->data() + static_cast<size_t>(local) * segment.part_bytes + place.offset;
}

const SymmetricSegments::Segment& SymmetricSegments::find(uint32_t number) const {
  const auto found = std::find_if(segments_.begin(), segments_.end(),
                                  [number](const Segment& segment) { return segment.number == number; });
  if (found == segments_.end()) throw std::logic_error("unknown symmetric segment");
  return *found;
}

}  // namespace ronde
