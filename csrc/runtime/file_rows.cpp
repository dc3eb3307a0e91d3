// SPDX-License-Identifier: Apache-2.0

#include "runtime/file_rows.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <vector>

namespace graphshard {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kAhead = 1 << 22;    // bytes that are asked for and not yet read, at most
constexpr int64_t kLongest = 1 << 20;  // bytes of one request
constexpr int64_t kMostPieces = 512;   // rows of one read; every system takes 1,024
constexpr int64_t kDropped = 2048;     // bytes between rows that are read, too, not to read twice;
                                       // below a page, so that none is read for them alone

struct Row {
  int64_t number;
  int64_t place;
};

std::vector<Row> in_order(const Ids& rows, const Ids& places, int64_t count, int64_t num_rows,
                          int64_t num_out) {
  std::vector<Row> order(static_cast<size_t>(count));
  bool ascends = true;
  for (int64_t i = 0; i < count; ++i) {
    const Row row{rows[i], places ? places[i] : i};
    if (row.number < 0 || row.number >= num_rows || row.place < 0 || row.place >= num_out) {
      throw std::out_of_range("a row number is outside its table");
    }
    order[static_cast<size_t>(i)] = row;
    ascends = ascends && (i == 0 || order[static_cast<size_t>(i - 1)].number <= row.number);
  }
  if (!ascends) {
    std::sort(order.begin(), order.end(),
              [](const Row& a, const Row& b) { return a.number < b.number; });
  }
  return order;
}

// Asks the system for the pages of rows that will be read, some way ahead of the reader.
class ReadAhead {
 public:
  ReadAhead(const FileTable& table, const std::vector<Row>& order) : table_(table), order_(order) {}

  // To be called with the number of rows that have been read.
  void advance(size_t done) {
    if (done < refill_at_) return;
    int64_t asked = 0;
    while (next_ < order_.size() && asked < kAhead) asked += ask();
    refill_at_ = (done + next_) / 2;
    if (next_ == order_.size()) refill_at_ = order_.size() + 1;
  }

 private:
  int64_t first_page(size_t i) const {
    return (table_.offset + order_[i].number * table_.row_bytes) / kPage;
  }
  int64_t last_page(size_t i) const {
    return (table_.offset + (order_[i].number + 1) * table_.row_bytes - 1) / kPage;
  }

  // One stretch of pages with rows in them; returns its bytes.
  int64_t ask() {
    const int64_t first = first_page(next_);
    int64_t last = last_page(next_);
    for (++next_; next_ < order_.size(); ++next_) {
      if (first_page(next_) > last + 1 || (last - first) * kPage >= kLongest) break;
      last = std::max(last, last_page(next_));
    }
    const int64_t bytes = (last + 1 - first) * kPage;
#if defined(POSIX_FADV_WILLNEED)
    posix_fadvise(table_.descriptor, static_cast<off_t>(first * kPage), static_cast<off_t>(bytes),
                  POSIX_FADV_WILLNEED);
#endif
    return bytes;
  }

  const FileTable& table_;
  const std::vector<Row>& order_;
  size_t next_ = 0;       // the first row that has not been asked for
  size_t refill_at_ = 0;  // so many rows read: half of what was asked for
};

// Reads all pieces, which are changed; 0 or an error number.
int read_all(int descriptor, int64_t at, std::vector<iovec>& pieces) {
  iovec* next = pieces.data();
  iovec* const end = next + pieces.size();
  while (next != end) {
    ssize_t got = preadv(descriptor, next, static_cast<int>(end - next), static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return EIO;
    at += got;
    while (next != end && got >= static_cast<ssize_t>(next->iov_len)) {
      got -= static_cast<ssize_t>(next->iov_len);
      ++next;
    }
    if (next != end) {
      next->iov_base = static_cast<char*>(next->iov_base) + got;
      next->iov_len -= static_cast<size_t>(got);
    }
  }
  return 0;
}

}  // namespace

int read_rows(const FileTable& table, const Ids& rows, const Ids& places, int64_t count, char* out,
              int64_t num_out) {
  if (count == 0 || table.row_bytes == 0) return 0;
  const std::vector<Row> order = in_order(rows, places, count, table.num_rows, num_out);
  ReadAhead ahead(table, order);
  std::vector<iovec> pieces;
  std::vector<char> dropped(kDropped);
  const size_t size = static_cast<size_t>(table.row_bytes);
  for (size_t i = 0; i < order.size();) {
    ahead.advance(i);
    pieces.clear();
    const int64_t first = order[i].number;
    int64_t next = first;
    // Rows that follow one another in the file, or nearly.
    for (; i < order.size() && static_cast<int64_t>(pieces.size()) + 1 < kMostPieces; ++i) {
      const int64_t between = (order[i].number - next) * table.row_bytes;
      if (between < 0 || between > kDropped) break;
      if (between > 0) pieces.push_back({dropped.data(), static_cast<size_t>(between)});
      next = order[i].number + 1;
      char* const to = out + order[i].place * table.row_bytes;
      if (!pieces.empty() &&
          static_cast<char*>(pieces.back().iov_base) + pieces.back().iov_len == to) {
        pieces.back().iov_len += size;
      } else {
        pieces.push_back({to, size});
      }
    }
    const int error = read_all(table.descriptor, table.offset + first * table.row_bytes, pieces);
    if (error != 0) return error;
  }
  return 0;
}

}  // namespace graphshard
