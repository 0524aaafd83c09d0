// A file that holds one JSON array, to which records are added, and which is whole at any moment: its process may be
// killed between any two instructions, or in the middle of a system call.
//
// What a kill can do to a write: the kernel copies page by page and looks for deadly signals in between, so a write
// within one page is made or not made, and a longer one may end at any page. Hence:
//   1. No record lies across the border of two pages. What is left of a page is filled up with spaces.
//   2. The last byte of the last page is the closing bracket. Records are added by writing that page again, whole.
//   3. A further page is first written as spaces, which may follow the bracket. Then one write replaces the bracket
//      before it by a space and all of the page by what belongs there.
// The write of rule 3 is the only one that a kill could part, between its first byte and the others, and what it would
// leave lacks nothing but the bracket, which readers of traces do not ask for. A disk that is full shows where spaces
// are written, with the same result as if nothing had been tried.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "descriptor.h"

namespace ronde {

class TraceFile {
 public:
  static constexpr size_t kPage = 4096;
  // A record may be so long.
  static constexpr size_t kLongest = kPage - 4;

  // Makes the file, in place of one that is there already. Throws std::system_error.
  explicit TraceFile(const std::string& path);

  // Adds a record: a JSON object. It is in the file after flush().
  void add(std::string_view record);
  // False if that is not possible any more; error() tells why. What is in the file stays whole.
  bool flush();
  // Writes what is left and cuts off the spaces at the end.
  bool close();
  int error() const { return error_; }

 private:
  bool write_at(const char* bytes, size_t count, size_t offset);
  bool write_spaces(size_t pages);

  Descriptor file_;
  std::string pages_;      // the file's last page and what is to follow, whole pages
  size_t first_page_ = 0;  // its number
  size_t used_ = 0;        // of the last of them
  bool is_empty_ = true;   // no record yet
  bool has_news_ = true;
  int error_ = 0;
};

}  // namespace ronde
