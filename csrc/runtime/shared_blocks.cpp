// SPDX-License-Identifier: Apache-2.0

#include "runtime/shared_blocks.h"

#include <cerrno>

#if defined(__linux__)

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>

namespace graphshard {
namespace {

struct Header {
  uint64_t token;
  uint64_t use;
  uint64_t left;
  uint64_t unused[5];
  uint64_t done[kSharedReaders];
};
static_assert(sizeof(Header) == kSharedHeader);

using Word = std::atomic_ref<uint64_t>;
// Across processes only what needs no lock is atomic.
static_assert(Word::is_always_lock_free);

// Another process's block, open and with its header mapped, if it is the right one.
class Opened {
 public:
  explicit Opened(const SharedPlace& place) {
    char path[64];
    std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", place.process, place.descriptor);
    file_ = open(path, O_RDWR | O_CLOEXEC);
    if (file_ < 0) {
      error_ = errno;
      return;
    }
    // A shorter file is another file, and to touch what it does not have would be a signal.
    if (lseek(file_, 0, SEEK_END) < static_cast<off_t>(kSharedHeader)) return;
    void* const found = mmap(nullptr, kSharedHeader, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (found == MAP_FAILED) {
      error_ = errno;
      return;
    }
    Header* const header = static_cast<Header*>(found);
    if (Word(header->token).load(std::memory_order_acquire) == place.token &&
        Word(header->use).load(std::memory_order_acquire) == place.use) {
      header_ = header;
    } else {
      munmap(found, kSharedHeader);
    }
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  ~Opened() {
    if (header_ != nullptr) munmap(header_, kSharedHeader);
    if (file_ >= 0) close(file_);
  }

  Header* header() const { return header_; }  // nullptr after an error
  int error() const { return error_; }
  int file() const { return file_; }

 private:
  int file_ = -1;
  int error_ = ESTALE;
  Header* header_ = nullptr;
};

}  // namespace

void begin_use(void* header, uint64_t token, uint64_t use) {
  Header* const of = static_cast<Header*>(header);
  Word(of->token).store(token, std::memory_order_release);
  Word(of->use).store(use, std::memory_order_release);
}

bool is_read(void* header, uint64_t use, const int64_t* readers, size_t num_readers) {
  Header* const of = static_cast<Header*>(header);
  for (size_t i = 0; i < num_readers; ++i) {
    if (Word(of->done[readers[i]]).load(std::memory_order_acquire) != use) return false;
  }
  return true;
}

void mark_left(void* header) {
  Word(static_cast<Header*>(header)->left).store(1, std::memory_order_release);
}

int read_shared(const SharedPlace& place, int reader, size_t offset, void* to, size_t size) {
  const Opened block(place);
  if (block.header() == nullptr) return block.error();
  size_t done = 0;
  while (done < size) {
    const ssize_t got = pread(block.file(), static_cast<char*>(to) + done, size - done,
                              static_cast<off_t>(kSharedHeader + offset + done));
    if (got == 0) return EIO;
    if (got < 0 && errno != EINTR) return errno;
    if (got > 0) done += static_cast<size_t>(got);
  }
  Word(block.header()->done[reader]).store(place.use, std::memory_order_release);
  return 0;
}

bool has_left(const SharedPlace& place) {
  const Opened block(place);
  return block.header() == nullptr ||
         Word(block.header()->left).load(std::memory_order_acquire) != 0;
}

}  // namespace graphshard

#else  // there is no /proc, and these are never called

namespace graphshard {

void begin_use(void*, uint64_t, uint64_t) {}

bool is_read(void*, uint64_t, const int64_t*, size_t) { return false; }

void mark_left(void*) {}

int read_shared(const SharedPlace&, int, size_t, void*, size_t) { return ENOSYS; }

bool has_left(const SharedPlace&) { return true; }

}  // namespace graphshard

#endif
