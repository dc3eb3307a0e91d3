// SPDX-License-Identifier: Apache-2.0

#include "sampling/id_table.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>

#include "runtime/large_blocks.h"
#include "runtime/types.h"
#include "sampling/random.h"

namespace graphshard {
namespace {

constexpr int64_t kIdsAhead = 32;

template <typename T>
T* zeros(int64_t count) {
  void* data = std::calloc(static_cast<size_t>(std::max<int64_t>(count, 1)), sizeof(T));
  if (data == nullptr) throw std::bad_alloc();
  expect_writes(data, static_cast<size_t>(count) * sizeof(T));
  return static_cast<T*>(data);
}

class Holding {
 public:
  explicit Holding(std::atomic_flag& busy) : busy_(busy) {
    if (busy_.test_and_set(std::memory_order_acquire)) {
      throw std::runtime_error("another thread is using this IdTable; make one per thread");
    }
  }
  ~Holding() { busy_.clear(std::memory_order_release); }
  Holding(const Holding&) = delete;
  Holding& operator=(const Holding&) = delete;

 private:
  std::atomic_flag& busy_;
};

}  // namespace

template <typename I>
int64_t IdTable::renumber(const I* first, int64_t num_first, const I* others, int64_t num_others,
                          I* ids, I* local) {
  const Holding holding(busy_);
  const int64_t most = num_first + num_others;
  constexpr int64_t kValues = std::numeric_limits<uint32_t>::max();
  if (most >= kValues) throw std::invalid_argument("at most 2^32 - 2 ids are renumbered at once");
  if (most > kValues - static_cast<int64_t>(base_)) clear();
  return num_ids_ <= kDirect ? number_direct(first, num_first, others, num_others, ids, local)
                             : number_hashed(first, num_first, others, num_others, ids, local);
}

void IdTable::clear() {
  if (direct_) std::memset(direct_.get(), 0, static_cast<size_t>(num_ids_) * sizeof(uint32_t));
  if (slots_) std::memset(slots_.get(), 0, static_cast<size_t>(num_slots_) * sizeof(Slot));
  base_ = 1;
}

template <typename I>
int64_t IdTable::number_direct(const I* first, int64_t num_first, const I* others,
                               int64_t num_others, I* ids, I* local) {
  if (!direct_) direct_.reset(zeros<uint32_t>(num_ids_));
  uint32_t* table = direct_.get();
  const uint64_t num_ids = static_cast<uint64_t>(num_ids_);
  const uint32_t base = base_;
  uint32_t next = base;
  const auto is_known = [&](I id) {
    return static_cast<uint64_t>(static_cast<int64_t>(id)) < num_ids;
  };
  // Of ids that are not checked yet, so that there may be no such place.
  const auto request = [&](I id) GRAPHSHARD_INLINE_LAMBDA {
    const uint64_t offset = static_cast<uint64_t>(static_cast<int64_t>(id)) * sizeof(uint32_t);
    GRAPHSHARD_PREFETCH_WRITE(reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(table) + offset));
  };
  for (int64_t i = 0; i < num_first; ++i) {
    if (i + kIdsAhead < num_first) request(first[i + kIdsAhead]);
    if (!is_known(first[i]) || table[first[i]] >= base) {
      base_ = next;
      return -1;
    }
    table[first[i]] = next++;
    ids[i] = first[i];
  }
  for (int64_t i = 0; i < num_others; ++i) {
    if (i + kIdsAhead < num_others) request(others[i + kIdsAhead]);
    const I id = others[i];
    if (!is_known(id)) {
      base_ = next;
      return -1;
    }
    // Without a branch on whether the id is new, which could not be predicted: in a large graph
    // half of them are. A product, because compilers make a branch of a choice.
    const uint32_t before = table[id];
    const uint32_t is_new = before < base ? 1 : 0;
    const uint32_t value = before + (next - before) * is_new;
    ids[next - base] = id;
    next += is_new;
    table[id] = value;
    local[i] = static_cast<I>(value - base);
  }
  base_ = next;
  return static_cast<int64_t>(next - base);
}

IdTable::Slot* IdTable::slot_of(int64_t id) const {
  return slots_.get() + (static_cast<uint64_t>(id) * kGamma >> shift_);
}

// For at least num_slots; the first `count` of ids have been numbered from base_ on.
template <typename I>
void IdTable::resize(int64_t num_slots, const I* ids, int64_t count) {
  num_slots_ = static_cast<int64_t>(
      std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(num_slots, 1024))));
  shift_ = 64 - (std::bit_width(static_cast<uint64_t>(num_slots_)) - 1);
  slots_.reset(zeros<Slot>(num_slots_));
  const Slot* end = slots_.get() + num_slots_;
  for (int64_t i = 0; i < count; ++i) {
    Slot* slot = slot_of(ids[i]);
    while (slot->value >= base_) slot = slot + 1 == end ? slots_.get() : slot + 1;
    *slot = {static_cast<int64_t>(ids[i]), base_ + static_cast<uint32_t>(i)};
  }
}

template <typename I>
int64_t IdTable::number_hashed(const I* first, int64_t num_first, const I* others,
                               int64_t num_others, I* ids, I* local) {
  if (num_slots_ <= 4 * num_first) resize(4 * num_first + 1, ids, 0);  // no slots at first
  const uint32_t base = base_;
  uint32_t next = base;
  const auto value_of = [&](int64_t id) {
    Slot* slot = slot_of(id);
    const Slot* end = slots_.get() + num_slots_;
    while (slot->value >= base) {
      if (slot->id == id) return slot->value;
      slot = slot + 1 == end ? slots_.get() : slot + 1;
    }
    *slot = {id, next};
    return next;
  };
  const auto run = [&](const I* given, int64_t count, bool distinct, I* numbers) {
    for (int64_t i = 0; i < count; ++i) {
      if (i + kIdsAhead < count) GRAPHSHARD_PREFETCH_WRITE(slot_of(given[i + kIdsAhead]));
      const I id = given[i];
      if (id < 0 || static_cast<int64_t>(id) >= num_ids_) return false;
      const uint32_t value = value_of(id);
      if (numbers != nullptr) numbers[i] = static_cast<I>(value - base);
      if (value != next) {
        if (distinct) return false;
        continue;
      }
      ids[next - base] = id;
      ++next;
      if (2 * static_cast<int64_t>(next - base) > num_slots_) {
        resize(4 * num_slots_, ids, static_cast<int64_t>(next - base));
      }
    }
    return true;
  };
  const bool good = run(first, num_first, true, nullptr) && run(others, num_others, false, local);
  base_ = next;
  return good ? static_cast<int64_t>(next - base) : -1;
}

template int64_t IdTable::renumber(const int32_t*, int64_t, const int32_t*, int64_t, int32_t*,
                                   int32_t*);
template int64_t IdTable::renumber(const int64_t*, int64_t, const int64_t*, int64_t, int64_t*,
                                   int64_t*);

}  // namespace graphshard
