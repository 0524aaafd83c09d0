// A file with one JSON array that grows by records and stays valid at any moment, even if its process is killed between
// two instructions or in the middle of a system call.
//
// The effect of a kill on a write: the kernel copies page by page and checks for fatal signals in between, so a write
// within one page happens completely or not at all, and a longer one may end at any page. Hence:
//   1. No record crosses the border of two pages. Spaces fill the rest of a page.
//   2. The last byte of the last page is the closing bracket. New records are added by rewriting that whole page.
//   3. A further page is first written as spaces, which may follow the bracket. Then one write replaces the preceding
//      bracket by a space and the page's spaces by its contents.
// Only the write of rule 3 can be split by a kill, between its first byte and the others. The result lacks only the
// bracket, which readers of traces do not require. A full disk shows when spaces are written, and leaves the file
// valid.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "system/descriptor.h"

namespace ronde {

class TraceFile {
 public:
  static constexpr size_t kPage = 4096;
  // The largest length of a record in bytes.
  static constexpr size_t kLongest = kPage - 4;

  // Creates the file, replacing an existing one. Throws std::system_error.
  explicit TraceFile(const std::string& path);

  // Adds a record, which is a JSON object. flush() writes it to the file.
  void add(std::string_view record);
  // Returns false if writing has failed; error() is the errno. The file stays valid.
  bool flush();
  // Writes the remaining records and cuts off the spaces at the end.
  bool close();
  int error() const { return error_; }

 private:
  bool write_at(const char* bytes, size_t count, size_t offset);
  bool write_spaces(size_t pages);

  Descriptor file_;
  std::string pages_;      // the file's last page and the pages to follow it
  size_t first_page_ = 0;  // the number of the first of them in the file
  size_t used_ = 0;        // bytes used in the last of them
  bool is_empty_ = true;   // no record yet
  bool has_news_ = true;
  int error_ = 0;
};

}  // namespace ronde
