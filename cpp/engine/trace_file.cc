#include "engine/trace_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>

namespace ronde {
namespace {

constexpr size_t kSpaces = 16 * TraceFile::kPage;  // at a time

const std::string& spaces() {
  static const std::string text(kSpaces, ' ');
  return text;
}

// Creates a new file; returns -1 and sets errno if that fails. In a directory where other users write, a link or a file
// of theirs may have that name: it is removed, neither followed nor written to.
Descriptor create_anew(const std::string& path) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  const int fd = open(path.c_str(), kFlags, 0666);
  if (fd >= 0 || errno != EEXIST || unlink(path.c_str()) != 0) return Descriptor(fd);
  return Descriptor(open(path.c_str(), kFlags, 0666));
}

}  // namespace

// Creates the file under another name and renames it, so that a reader never sees it empty.
TraceFile::TraceFile(const std::string& path) : pages_(kPage, ' ') {
  const std::string draft = path + ".new";
  file_ = create_anew(draft);
  if (file_.get() < 0) throw std::system_error(errno, std::generic_category(), draft);
  pages_[used_++] = '[';
  if (!flush() || rename(draft.c_str(), path.c_str()) != 0) {
    const int error = error_ != 0 ? error_ : errno;
    unlink(draft.c_str());
    throw std::system_error(error, std::generic_category(), path);
  }
}

void TraceFile::add(std::string_view record) {
  if (record.size() > kLongest || error_ != 0) return;
  if (used_ + record.size() + 2 > kPage - 1) {  // 2 bytes for a comma and an end of line, 1 for the bracket
    pages_.append(kPage, ' ');
    used_ = 0;
  }
  char* to = pages_.data() + pages_.size() - kPage + used_;
  *to++ = is_empty_ ? ' ' : ',';
  std::memcpy(to, record.data(), record.size());
  to[record.size()] = '\n';
  used_ += record.size() + 2;
  is_empty_ = false;
  has_news_ = true;
}

bool TraceFile::flush() {
  if (error_ != 0 || !has_news_) return error_ == 0;
  const size_t pages = pages_.size() / kPage;
  if (!write_spaces(pages - 1)) return false;
  for (size_t page = 0; page < pages; ++page) {
    const size_t before = page > 0 ? 1 : 0;  // the bracket of the preceding page
    char* const text = pages_.data() + page * kPage - before;
    text[0] = before > 0 ? ' ' : text[0];
    text[before + kPage - 1] = ']';
    if (!write_at(text, before + kPage, (first_page_ + page) * kPage - before)) return false;
  }
  pages_.erase(0, (pages - 1) * kPage);
  first_page_ += pages - 1;
  has_news_ = false;
  return true;
}

bool TraceFile::close() {
  if (!flush()) return false;
  pages_[used_] = ']';
  std::fill(pages_.begin() + static_cast<ptrdiff_t>(used_) + 1, pages_.end(), ' ');
  if (!write_at(pages_.data(), kPage, first_page_ * kPage)) return false;
  if (ftruncate(file_.get(), static_cast<off_t>(first_page_ * kPage + used_ + 1)) != 0) error_ = errno;
  file_.reset();
  return error_ == 0;
}

// Writes `pages` pages of spaces behind the last page.
bool TraceFile::write_spaces(size_t pages) {
  const size_t begin = (first_page_ + 1) * kPage;
  for (size_t done = 0; done < pages * kPage; done += kSpaces) {
    if (!write_at(spaces().data(), std::min(kSpaces, pages * kPage - done), begin + done)) return false;
  }
  return true;
}

bool TraceFile::write_at(const char* bytes, size_t count, size_t offset) {
  while (count > 0) {
    const ssize_t written = pwrite(file_.get(), bytes, count, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      error_ = written < 0 ? errno : ENOSPC;
      return false;
    }
    bytes += written;
    count -= static_cast<size_t>(written);
    offset += static_cast<size_t>(written);
  }
  return true;
}

}  // namespace ronde
