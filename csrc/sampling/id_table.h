// SPDX-License-Identifier: Apache-2.0
// Consecutive numbers for ids, in the order in which they appear.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace graphshard {

// Up to kDirect ids the table is an array with a place for each, beyond that a hash table. What a
// call writes there is above all that earlier calls wrote, so nothing is cleared in between.
class IdTable {
 public:
  static constexpr int64_t kDirect = int64_t{1} << 24;

  explicit IdTable(int64_t num_ids) : num_ids_(num_ids) {}

  // Numbers `first` from 0 on, then each new one of `others`. Writes the id behind each number to
  // ids, which has room for all, and each of others' numbers to local. Returns how many numbers
  // there are, or -1 if an id is out of range or first repeats one.
  template <typename I>
  int64_t renumber(const I* first, int64_t num_first, const I* others, int64_t num_others, I* ids,
                   I* local);

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  struct Slot {
    int64_t id;
    uint32_t value;
  };

  template <typename I>
  int64_t number_direct(const I* first, int64_t num_first, const I* others, int64_t num_others,
                        I* ids, I* local);
  template <typename I>
  int64_t number_hashed(const I* first, int64_t num_first, const I* others, int64_t num_others,
                        I* ids, I* local);
  Slot* slot_of(int64_t id) const;
  template <typename I>
  void resize(int64_t num_slots, const I* ids, int64_t count);
  void clear();

  int64_t num_ids_;
  std::unique_ptr<uint32_t[], Free> direct_;
  std::unique_ptr<Slot[], Free> slots_;
  int64_t num_slots_ = 0;
  int shift_ = 0;
  uint32_t base_ = 1;  // entries below it are of earlier calls
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

}  // namespace graphshard
