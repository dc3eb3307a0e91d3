// SPDX-License-Identifier: Apache-2.0
// Consecutive numbers for keys of any size and kind, in the order in which they first appear; and
// how many edges of a list are repeated.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace graphshard {

// Numbers integers, below 2^38 - 1 of them. Where they are dense, the table is an array with a
// place for each, else a hash table of lines, as memory comes in them.
class IntegerTable {
 public:
  int64_t size() const { return static_cast<int64_t>(keys_.size()); }
  const int64_t* keys() const { return keys_.data(); }

  // Writes the number of each key, -1 where it has none. Row is int32_t or int64_t, and holds every
  // number.
  template <typename Row>
  void find(const int64_t* keys, int64_t count, Row* rows) const;
  // Writes the number of each key; a new one gets the next.
  void insert(const int64_t* keys, int64_t count, int64_t* rows);
  // Tells how many keys there will be, so that the table does not grow step by step.
  void reserve(int64_t num_keys);

 private:
  static constexpr uint64_t kSlots = 5;
  static constexpr int kHighBits = 6;
  // Keys are filled in from the front. Of each, one more than its number, 0 where there is none: 32
  // bits of it in `low`, 6 in `high`.
  struct alignas(64) Line {
    int64_t keys[kSlots];
    uint32_t low[kSlots];
    uint32_t high;

    int64_t row(uint64_t slot) const {
      const uint64_t above = high >> (slot * kHighBits) & ((uint32_t{1} << kHighBits) - 1);
      return static_cast<int64_t>(above << 32 | low[slot]) - 1;
    }
    void fill(uint64_t slot, int64_t key, int64_t row);
  };
  static_assert(sizeof(Line) == 64);

  bool reach(int64_t low, int64_t high, int64_t count);
  void use_hash(int64_t num_lines);
  bool is_full(int64_t num_keys) const;
  uint64_t line_of(int64_t key) const;
  int64_t row_beyond(uint64_t line, int64_t key) const;
  int64_t row_to_fill(int64_t key, int64_t row);

  std::vector<int64_t> keys_;
  std::vector<int32_t> direct_;  // the number of key first_ + i, -1 where there is none
  int64_t first_ = 0;
  bool is_direct_ = true;
  std::vector<Line> lines_;
};

// Numbers texts, or other strings of bytes, which are data[offsets[i], offsets[i + 1]); below 2^32
// of them. Offset is int32_t or int64_t.
class BytesTable {
 public:
  int64_t size() const { return size_; }
  int64_t num_bytes() const { return num_bytes_; }
  // Writes the texts in the order of their numbers; offsets has room for size() + 1.
  void copy_keys(int64_t* offsets, uint8_t* data) const;

  template <typename Offset, typename Row>
  void find(const Offset* offsets, const uint8_t* data, int64_t count, Row* rows) const;
  template <typename Offset>
  void insert(const Offset* offsets, const uint8_t* data, int64_t count, int64_t* rows);
  // Tells how many texts there will be.
  void reserve(int64_t num_keys);

 private:
  // Eight bytes, as looking into a slot is to miss the cache.
  struct Slot {
    uint32_t tag;   // the lower half of the hash
    uint32_t next;  // one above the place of the record, in words; 0: empty
  };
  // Before each text in records_, whose texts are filled up to whole words: so that one look at
  // memory finds all that there is about a text.
  struct Header {
    uint32_t row;
    uint32_t length;
  };

  Header header_at(uint64_t place) const;
  bool is_key(uint64_t place, const uint8_t* text, int64_t length) const;
  void append(const uint8_t* text, int64_t length);

  int64_t size_ = 0;
  int64_t num_bytes_ = 0;
  std::vector<uint64_t> records_;
  std::vector<Slot> slots_;
  int shift_ = 0;
};

struct ParsedIntegers {
  bool are_integers = true;  // all of them, each written as a program writes it
  bool has_negative = false;
  bool has_large = false;  // above what int64 holds; out has the bits of uint64
};

// The integers that cells are: an optional minus sign and digits, without leading zeros.
template <typename Offset>
ParsedIntegers parse_integers(const Offset* offsets, const uint8_t* data, int64_t count,
                              int64_t* out);

// Whether a cell begins or ends with a blank, or what comes before it in ASCII.
template <typename Offset>
bool any_outer_blank(const Offset* offsets, const uint8_t* data, int64_t count);

// How many edges have both ends of an earlier one. There are fewer than 2^63 pairs of nodes. Id is
// int32_t or int64_t.
template <typename Id>
int64_t count_repeated(const Id* src, const Id* dst, int64_t num_edges, int64_t num_src,
                       int64_t num_dst, int num_threads);

}  // namespace graphshard
