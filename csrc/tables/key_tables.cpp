// SPDX-License-Identifier: Apache-2.0

#include "tables/key_tables.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>

#include "runtime/large_blocks.h"
#include "runtime/parallel.h"
#include "runtime/types.h"

namespace graphshard {
namespace {

// Keys ahead of the current one whose line is asked for: as many as memory brings at once, and
// more, as a request that finds no room waits where those behind it could not.
constexpr int64_t kAhead = 64;
constexpr int64_t kBlock = 64;
constexpr int64_t kSlack = int64_t{1} << 20;
constexpr int64_t kMostDirect = std::numeric_limits<int32_t>::max();
constexpr uint64_t kFactor = 0x9E3779B97F4A7C15u;

int shift_for(int64_t num_slots) {
  return 64 - (std::bit_width(static_cast<uint64_t>(num_slots)) - 1);
}

int64_t slots_for(int64_t num_keys) {
  return static_cast<int64_t>(
      std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(2 * num_keys, 1024))));
}

// Up to seven tenths of the slots are taken.
bool is_full(int64_t num_keys, size_t num_slots) {
  return 10 * num_keys > 7 * static_cast<int64_t>(num_slots);
}

uint64_t mixed(uint64_t value) {
  value ^= value >> 32;
  value *= 0xD6E8FEB86659FD93u;
  value ^= value >> 32;
  value *= 0xD6E8FEB86659FD93u;
  return value ^ value >> 32;
}

uint64_t hash_of(const uint8_t* text, int64_t length) {
  uint64_t hash = static_cast<uint64_t>(length) * kFactor;
  int64_t at = 0;
  for (; at + 8 <= length; at += 8) {
    uint64_t word;
    std::memcpy(&word, text + at, 8);
    hash = (hash ^ word) * kFactor;
    hash ^= hash >> 29;
  }
  if (at < length) {
    uint64_t word = 0;
    std::memcpy(&word, text + at, static_cast<size_t>(length - at));
    hash = (hash ^ word) * kFactor;
  }
  return mixed(hash);
}

// What a vector will hold lies in large pages, as each look into it would else miss two caches.
template <typename T>
void reserve_in_large_pages(std::vector<T>& vector, size_t size) {
  vector.reserve(size);
  expect_writes(vector.data(), size * sizeof(T));
}

// As many values, all alike, in place of those that are there.
template <typename T>
void refill(std::vector<T>& vector, size_t size, const T& value) {
  vector = {};
  reserve_in_large_pages(vector, size);
  vector.assign(size, value);
}

}  // namespace

// ---- integers

void IntegerTable::Line::fill(uint64_t slot, int64_t key, int64_t row) {
  const uint64_t number = static_cast<uint64_t>(row) + 1;
  keys[slot] = key;
  low[slot] = static_cast<uint32_t>(number);
  high |= static_cast<uint32_t>(number >> 32) << (slot * kHighBits);
}

uint64_t IntegerTable::line_of(int64_t key) const {
  // Keys that are multiples of something must not meet: hashes of others often are.
  const uint64_t bits = static_cast<uint64_t>(key);
  return ((bits ^ bits >> 32) * 0xD6E8FEB86659FD93u >> 32) * lines_.size() >> 32;
}

template <typename Row>
void IntegerTable::find(const int64_t* keys, int64_t count, Row* rows) const {
  if (is_direct_) {
    const uint64_t size = direct_.size();
    const int32_t* table = direct_.data();
    const uint64_t first = static_cast<uint64_t>(first_);
    for (int64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        const uint64_t ahead = static_cast<uint64_t>(keys[i + kAhead]) - first;
        if (ahead < size) GRAPHSHARD_PREFETCH(table + ahead);
      }
      const uint64_t place = static_cast<uint64_t>(keys[i]) - first;
      rows[i] = place < size ? table[place] : -1;
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) GRAPHSHARD_PREFETCH(&lines_[line_of(keys[i + kAhead])]);
    const int64_t key = keys[i];
    const uint64_t number = line_of(key);
    const Line& line = lines_[number];
    // All keys of a line at once: to stop at the first would be to guess which one it is.
    uint32_t same = 0;
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      same |= static_cast<uint32_t>(line.keys[slot] == key) << slot;
    }
    if (same != 0) {  // the first of them is the key, or it is empty, as those before are not
      rows[i] = static_cast<Row>(line.row(static_cast<uint64_t>(std::countr_zero(same))));
    } else {
      rows[i] = static_cast<Row>(line.row(kSlots - 1) < 0 ? -1 : row_beyond(number, key));
    }
  }
}

template void IntegerTable::find(const int64_t*, int64_t, int32_t*) const;
template void IntegerTable::find(const int64_t*, int64_t, int64_t*) const;

// The number of a key whose line is full and does not have it.
int64_t IntegerTable::row_beyond(uint64_t line, int64_t key) const {
  for (;;) {
    line = line + 1 == lines_.size() ? 0 : line + 1;
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      const int64_t row = lines_[line].row(slot);
      if (row < 0 || lines_[line].keys[slot] == key) return row;
    }
  }
}

// The number of a key; it is `row` if the key is not there yet.
int64_t IntegerTable::row_to_fill(int64_t key, int64_t row) {
  for (uint64_t number = line_of(key);; number = number + 1 == lines_.size() ? 0 : number + 1) {
    Line& line = lines_[number];
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      const int64_t there = line.row(slot);
      if (there >= 0 && line.keys[slot] != key) continue;
      if (there >= 0) return there;
      line.fill(slot, key, row);
      return row;
    }
  }
}

// Whether the array has, or can be given, a place for each key from low to high.
bool IntegerTable::reach(int64_t low, int64_t high, int64_t count) {
  const int64_t num_keys = size() + count;
  if (num_keys > kMostDirect) return false;
  const bool is_empty = direct_.empty();
  const int64_t last = is_empty ? high : first_ + static_cast<int64_t>(direct_.size()) - 1;
  if (!is_empty && low >= first_ && high <= last) return true;
  const int64_t new_low = is_empty ? low : std::min(low, first_);
  const int64_t new_high = is_empty ? high : std::max(high, last);
  const uint64_t span = static_cast<uint64_t>(new_high) - static_cast<uint64_t>(new_low);
  if (span > static_cast<uint64_t>(8 * num_keys + kSlack)) return false;
  // Room for as many again, on the sides that grow, so that not every call moves all.
  int64_t from = new_low;
  int64_t to = new_high;
  const int64_t more = is_empty ? 0 : static_cast<int64_t>(span / 2);
  if (!is_empty && low < first_ && from > std::numeric_limits<int64_t>::min() + more) from -= more;
  if (!is_empty && high > last && to < std::numeric_limits<int64_t>::max() - more) to += more;
  std::vector<int32_t> table;
  refill(table, static_cast<size_t>(to - from + 1), int32_t{-1});
  for (int64_t row = 0; row < size(); ++row) {
    table[static_cast<size_t>(keys_[static_cast<size_t>(row)] - from)] = static_cast<int32_t>(row);
  }
  direct_ = std::move(table);
  first_ = from;
  return true;
}

// Up to three fifths of the slots are taken.
bool IntegerTable::is_full(int64_t num_keys) const {
  return num_keys > 3 * static_cast<int64_t>(lines_.size());
}

void IntegerTable::use_hash(int64_t num_lines) {
  is_direct_ = false;
  direct_ = {};
  num_lines = std::max<int64_t>(num_lines, 256);
  if (num_lines <= static_cast<int64_t>(lines_.size())) return;
  if (num_lines > std::numeric_limits<uint32_t>::max()) {
    throw std::invalid_argument("a table of integers has less than 2^32 lines");
  }
  refill(lines_, static_cast<size_t>(num_lines), Line{});
  for (int64_t row = 0; row < size(); ++row) {
    if (row + kAhead < size()) {
      const int64_t ahead = keys_[static_cast<size_t>(row + kAhead)];
      GRAPHSHARD_PREFETCH_WRITE(&lines_[line_of(ahead)]);
    }
    row_to_fill(keys_[static_cast<size_t>(row)], row);
  }
}

void IntegerTable::reserve(int64_t num_keys) {
  // An array of places grows at little cost; in a hash table, all keys move each time.
  if (is_direct_ || num_keys <= size()) return;
  keys_.reserve(static_cast<size_t>(num_keys));
  use_hash(num_keys / 2);
}

void IntegerTable::insert(const int64_t* keys, int64_t count, int64_t* rows) {
  if (count == 0) return;
  if (is_direct_) {
    const auto [low, high] = std::minmax_element(keys, keys + count);
    if (reach(*low, *high, count)) {
      for (int64_t i = 0; i < count; ++i) {
        int32_t& row = direct_[static_cast<size_t>(keys[i] - first_)];
        if (row < 0) {
          row = static_cast<int32_t>(keys_.size());
          keys_.push_back(keys[i]);
        }
        rows[i] = row;
      }
      return;
    }
    use_hash(size());
  }
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    if (is_full(size() + kBlock)) use_hash(3 * (size() + kBlock) / 4);
    for (int64_t i = begin; i < end; ++i) {
      GRAPHSHARD_PREFETCH_WRITE(&lines_[line_of(keys[i])]);
    }
    for (int64_t i = begin; i < end; ++i) {
      rows[i] = row_to_fill(keys[i], size());
      if (rows[i] == size()) keys_.push_back(keys[i]);
    }
  }
}

// ---- bytes

BytesTable::Header BytesTable::header_at(uint64_t place) const {
  Header header;
  std::memcpy(&header, records_.data() + place, sizeof(header));
  return header;
}

bool BytesTable::is_key(uint64_t place, const uint8_t* text, int64_t length) const {
  return header_at(place).length == length &&
         (length == 0 ||
          std::memcmp(records_.data() + place + 1, text, static_cast<size_t>(length)) == 0);
}

void BytesTable::append(const uint8_t* text, int64_t length) {
  const size_t num_words = 1 + (static_cast<size_t>(length) + 7) / 8;
  const size_t place = records_.size();
  if (place + num_words > std::numeric_limits<uint32_t>::max() ||
      length > std::numeric_limits<uint32_t>::max()) {
    throw std::invalid_argument("a table holds less than 2^35 bytes of text");
  }
  if (place + num_words > records_.capacity()) {
    std::vector<uint64_t> grown;
    reserve_in_large_pages(grown, std::max<size_t>({2 * place, place + num_words, 1024}));
    grown.assign(records_.begin(), records_.end());
    records_ = std::move(grown);
  }
  records_.resize(place + num_words);
  const Header header{static_cast<uint32_t>(size_), static_cast<uint32_t>(length)};
  std::memcpy(records_.data() + place, &header, sizeof(header));
  if (length > 0) {
    std::memcpy(records_.data() + place + 1, text, static_cast<size_t>(length));
  }
  ++size_;
  num_bytes_ += length;
}

void BytesTable::copy_keys(int64_t* offsets, uint8_t* data) const {
  size_t place = 0;
  int64_t at = 0;
  for (int64_t row = 0; row < size_; ++row) {
    const int64_t length = header_at(place).length;
    offsets[row] = at;
    if (length > 0) {
      std::memcpy(data + at, records_.data() + place + 1, static_cast<size_t>(length));
    }
    at += length;
    place += 1 + (static_cast<size_t>(length) + 7) / 8;
  }
  offsets[size_] = at;
}

template <typename Offset, typename Row>
void BytesTable::find(const Offset* offsets, const uint8_t* data, int64_t count, Row* rows) const {
  if (slots_.empty()) {
    std::fill(rows, rows + count, Row{-1});
    return;
  }
  const uint64_t mask = slots_.size() - 1;
  uint64_t hashes[kBlock];
  uint64_t places[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin);
    for (int64_t i = 0; i < size; ++i) {
      const Offset at = offsets[begin + i];
      hashes[i] = hash_of(data + at, offsets[begin + i + 1] - at);
      GRAPHSHARD_PREFETCH(&slots_[hashes[i] >> shift_]);
    }
    // What has the same tag is, but for one case in 2^32, the same text.
    for (int64_t i = 0; i < size; ++i) {
      const uint32_t tag = static_cast<uint32_t>(hashes[i]);
      uint64_t place = hashes[i] >> shift_;
      while (slots_[place].next != 0 && slots_[place].tag != tag) place = (place + 1) & mask;
      places[i] = place;
      if (slots_[place].next != 0) GRAPHSHARD_PREFETCH(&records_[slots_[place].next - 1]);
    }
    for (int64_t i = 0; i < size; ++i) {
      const uint8_t* text = data + offsets[begin + i];
      const int64_t length = offsets[begin + i + 1] - offsets[begin + i];
      const uint32_t tag = static_cast<uint32_t>(hashes[i]);
      uint64_t place = places[i];
      while (slots_[place].next != 0 &&
             !(slots_[place].tag == tag && is_key(slots_[place].next - 1, text, length))) {
        place = (place + 1) & mask;
      }
      const uint32_t next = slots_[place].next;
      rows[begin + i] = next == 0 ? Row{-1} : static_cast<Row>(header_at(next - 1).row);
    }
  }
}

void BytesTable::reserve(int64_t num_keys) {
  if (num_keys >= std::numeric_limits<uint32_t>::max()) {
    throw std::invalid_argument("a table holds fewer than 2^32 texts");
  }
  if (num_keys <= size() || !is_full(num_keys, slots_.size())) return;
  const int64_t num_slots = slots_for(num_keys);
  refill(slots_, static_cast<size_t>(num_slots), Slot{0, 0});
  shift_ = shift_for(num_slots);
  const uint64_t mask = static_cast<uint64_t>(num_slots) - 1;
  uint64_t hashes[kBlock];
  uint32_t nexts[kBlock];
  size_t record = 0;
  for (int64_t begin = 0; begin < size(); begin += kBlock) {
    const int64_t number = std::min(kBlock, size() - begin);
    for (int64_t i = 0; i < number; ++i) {
      const int64_t length = header_at(record).length;
      hashes[i] = hash_of(reinterpret_cast<const uint8_t*>(records_.data() + record + 1), length);
      nexts[i] = static_cast<uint32_t>(record + 1);
      record += 1 + (static_cast<size_t>(length) + 7) / 8;
      GRAPHSHARD_PREFETCH_WRITE(&slots_[hashes[i] >> shift_]);
    }
    for (int64_t i = 0; i < number; ++i) {
      uint64_t place = hashes[i] >> shift_;
      while (slots_[place].next != 0) place = (place + 1) & mask;
      slots_[place] = {static_cast<uint32_t>(hashes[i]), nexts[i]};
    }
  }
}

template <typename Offset>
void BytesTable::insert(const Offset* offsets, const uint8_t* data, int64_t count, int64_t* rows) {
  uint64_t hashes[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t number = std::min(kBlock, count - begin);
    reserve(size() + kBlock);
    const uint64_t mask = slots_.size() - 1;
    for (int64_t i = 0; i < number; ++i) {
      const Offset at = offsets[begin + i];
      hashes[i] = hash_of(data + at, offsets[begin + i + 1] - at);
      GRAPHSHARD_PREFETCH_WRITE(&slots_[hashes[i] >> shift_]);
    }
    for (int64_t i = 0; i < number; ++i) {
      const uint8_t* text = data + offsets[begin + i];
      const int64_t length = offsets[begin + i + 1] - offsets[begin + i];
      const uint32_t tag = static_cast<uint32_t>(hashes[i]);
      uint64_t place = hashes[i] >> shift_;
      while (slots_[place].next != 0 &&
             !(slots_[place].tag == tag && is_key(slots_[place].next - 1, text, length))) {
        place = (place + 1) & mask;
      }
      if (slots_[place].next == 0) {
        const size_t record = records_.size();
        append(text, length);
        slots_[place] = {tag, static_cast<uint32_t>(record + 1)};
      }
      rows[begin + i] = static_cast<int64_t>(header_at(slots_[place].next - 1).row);
    }
  }
}

template void BytesTable::find(const int32_t*, const uint8_t*, int64_t, int32_t*) const;
template void BytesTable::find(const int32_t*, const uint8_t*, int64_t, int64_t*) const;
template void BytesTable::find(const int64_t*, const uint8_t*, int64_t, int32_t*) const;
template void BytesTable::find(const int64_t*, const uint8_t*, int64_t, int64_t*) const;
template void BytesTable::insert(const int32_t*, const uint8_t*, int64_t, int64_t*);
template void BytesTable::insert(const int64_t*, const uint8_t*, int64_t, int64_t*);

// ---- cells

template <typename Offset>
ParsedIntegers parse_integers(const Offset* offsets, const uint8_t* data, int64_t count,
                              int64_t* out) {
  constexpr uint64_t kLargest = std::numeric_limits<uint64_t>::max();
  constexpr uint64_t kTop = uint64_t{1} << 63;
  constexpr int64_t kSurelyFits = 19;  // digits
  ParsedIntegers parsed;
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* at = data + offsets[i];
    const uint8_t* end = data + offsets[i + 1];
    const bool is_negative = at < end && *at == '-';
    at += is_negative ? 1 : 0;
    const int64_t num_digits = end - at;
    const bool is_zero = num_digits == 1 && *at == '0';
    if (num_digits < 1 || num_digits > 20 || (*at == '0' && (!is_zero || is_negative))) {
      parsed.are_integers = false;
      return parsed;
    }
    uint64_t value = 0;
    bool is_integer = true;
    for (const uint8_t* stop = at + std::min(num_digits, kSurelyFits); at < stop; ++at) {
      const uint64_t digit = static_cast<uint64_t>(*at) - '0';
      is_integer &= digit <= 9;
      value = 10 * value + digit;
    }
    if (at < end) {
      const uint64_t digit = static_cast<uint64_t>(*at) - '0';
      is_integer &= digit <= 9 &&
                    (value < kLargest / 10 || (value == kLargest / 10 && digit <= kLargest % 10));
      value = 10 * value + digit;
    }
    if (!is_integer || (is_negative && value > kTop)) {
      parsed.are_integers = false;
      return parsed;
    }
    parsed.has_negative |= is_negative;
    parsed.has_large |= !is_negative && value >= kTop;
    out[i] = static_cast<int64_t>(is_negative ? ~value + 1 : value);
  }
  return parsed;
}

template ParsedIntegers parse_integers(const int32_t*, const uint8_t*, int64_t, int64_t*);
template ParsedIntegers parse_integers(const int64_t*, const uint8_t*, int64_t, int64_t*);

template <typename Offset>
bool any_outer_blank(const Offset* offsets, const uint8_t* data, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const Offset begin = offsets[i];
    const Offset end = offsets[i + 1];
    if (begin < end && (data[begin] <= ' ' || data[end - 1] <= ' ')) return true;
  }
  return false;
}

template bool any_outer_blank(const int32_t*, const uint8_t*, int64_t);
template bool any_outer_blank(const int64_t*, const uint8_t*, int64_t);

// ---- edges

namespace {

// Finds repeated codes of one part; its arrays are used again for the next.
//
// Few codes are repeated, and a hash table of all of them costs twice what this does: the first
// pass sets a bit for each code, and where it was set before, a bit of another hash in a second
// map. All codes that are repeated have the latter, and few others: only these are compared.
template <typename Code>
class RepeatedCodes {
 public:
  int64_t count(const Code* codes, int64_t number) {
    const int bits = std::bit_width(static_cast<uint64_t>(std::max<int64_t>(4 * number, 1024)));
    const int shift = 64 - bits;
    seen_.assign(size_t{1} << (bits - 6), 0);
    doubted_.assign(size_t{1} << (bits - 6), 0);
    chosen_.resize(static_cast<size_t>(number) + 1);  // one more is written, and not counted
    size_t num_chosen = 0;
    for (int64_t i = 0; i < number; ++i) {
      const uint64_t hash = codes[i] * kFactor >> shift;
      const uint64_t bit = uint64_t{1} << (hash & 63);
      chosen_[num_chosen] = codes[i];
      num_chosen += (seen_[hash >> 6] & bit) != 0 ? 1 : 0;
      seen_[hash >> 6] |= bit;
    }
    if (num_chosen == 0) return 0;
    for (size_t i = 0; i < num_chosen; ++i) {
      const uint64_t hash = chosen_[i] * kOtherFactor >> shift;
      doubted_[hash >> 6] |= uint64_t{1} << (hash & 63);
    }
    num_chosen = 0;
    for (int64_t i = 0; i < number; ++i) {
      const uint64_t hash = codes[i] * kOtherFactor >> shift;
      chosen_[num_chosen] = codes[i];
      num_chosen += doubted_[hash >> 6] >> (hash & 63) & 1;
    }
    return compare(static_cast<int64_t>(num_chosen));
  }

 private:
  static constexpr uint64_t kOtherFactor = 0xD6E8FEB86659FD93u;

  // How many of the chosen codes are equal to an earlier one.
  int64_t compare(int64_t num_chosen) {
    const int64_t num_slots = slots_for(num_chosen);
    const int shift = shift_for(num_slots);
    const uint64_t mask = static_cast<uint64_t>(num_slots) - 1;
    table_.assign(static_cast<size_t>(num_slots), Code{0});  // 0 is an empty slot
    int64_t number = 0;
    int64_t num_zeros = 0;
    for (int64_t i = 0; i < num_chosen; ++i) {
      const Code code = chosen_[static_cast<size_t>(i)];
      uint64_t place = code * kFactor >> shift;
      while (table_[place] != 0 && table_[place] != code) place = (place + 1) & mask;
      number += table_[place] == code ? 1 : 0;
      num_zeros += code == 0 ? 1 : 0;
      table_[place] = code;
    }
    // Each code of 0 found its slot as it was, and counts as repeated; the first is not.
    return number - (num_zeros > 0 ? 1 : 0);
  }

  std::vector<uint64_t> seen_;
  std::vector<uint64_t> doubted_;
  std::vector<Code> chosen_;
  std::vector<Code> table_;
};

// What count_repeated does; the codes of edges are numbers of num_bits.
template <typename Code, typename Id>
int64_t count_repeated_codes(const Id* src, const Id* dst, int64_t num_edges, int64_t num_dst,
                             int num_bits, int part_bits, int num_threads) {
  const uint64_t all_bits = std::numeric_limits<uint64_t>::max() >> (64 - num_bits);
  const int rest_bits = num_bits - part_bits;
  const uint64_t rest_mask = (uint64_t{1} << rest_bits) - 1;
  const int64_t parts = int64_t{1} << part_bits;
  // To multiply by an odd number is to give each code another number of as many bits.
  const auto code_of = [&](int64_t i) {
    const uint64_t code = static_cast<uint64_t>(src[i]) * static_cast<uint64_t>(num_dst) +
                          static_cast<uint64_t>(dst[i]);
    return code * kFactor & all_bits;
  };
  // Each thread counts, and later moves, the edges of a block.
  const int64_t num_blocks = num_parts(num_edges, int64_t{1} << 20, num_threads);
  const int64_t per_block = (num_edges + num_blocks - 1) / num_blocks;
  const auto each_edge = [&](int64_t block, const auto& visit) {
    const int64_t end = std::min((block + 1) * per_block, num_edges);
    for (int64_t i = block * per_block; i < end; ++i) visit(code_of(i));
  };
  std::vector<int64_t> next(static_cast<size_t>(num_blocks * parts), 0);
  run_tasks(num_blocks, num_threads, [&](int64_t block) {
    int64_t* counts = next.data() + block * parts;
    each_edge(block, [&](uint64_t code) { ++counts[code >> rest_bits]; });
  });
  std::vector<int64_t> starts(static_cast<size_t>(parts) + 1, 0);
  int64_t start = 0;
  for (int64_t part = 0; part < parts; ++part) {
    starts[static_cast<size_t>(part)] = start;
    for (int64_t block = 0; block < num_blocks; ++block) {
      start += std::exchange(next[static_cast<size_t>(block * parts + part)], start);
    }
  }
  starts[static_cast<size_t>(parts)] = start;
  // Not a vector, which would write zeros first.
  const std::unique_ptr<Code[]> codes(new Code[static_cast<size_t>(num_edges)]);
  expect_writes(codes.get(), static_cast<size_t>(num_edges) * sizeof(Code));
  run_tasks(num_blocks, num_threads, [&](int64_t block) {
    int64_t* places = next.data() + block * parts;
    each_edge(block, [&](uint64_t code) {
      codes[static_cast<size_t>(places[code >> rest_bits]++)] = static_cast<Code>(code & rest_mask);
    });
  });
  // Some parts after each other, with the same arrays.
  const int64_t num_runs = std::min<int64_t>(parts, 16 * int64_t{num_threads});
  std::vector<int64_t> repeated(static_cast<size_t>(num_runs), 0);
  run_tasks(num_runs, num_threads, [&](int64_t run) {
    RepeatedCodes<Code> of_part;
    int64_t number = 0;
    const int64_t last = part_begin(parts, run + 1, num_runs);
    for (int64_t part = part_begin(parts, run, num_runs); part < last; ++part) {
      const int64_t begin = starts[static_cast<size_t>(part)];
      number += of_part.count(codes.get() + begin, starts[static_cast<size_t>(part) + 1] - begin);
    }
    repeated[static_cast<size_t>(run)] = number;
  });
  int64_t total = 0;
  for (const int64_t number : repeated) total += number;
  return total;
}

}  // namespace

template <typename Id>
int64_t count_repeated(const Id* src, const Id* dst, int64_t num_edges, int64_t num_src,
                       int64_t num_dst, int num_threads) {
  if (num_edges < 2) return 0;
  const uint64_t num_codes = static_cast<uint64_t>(num_src) * static_cast<uint64_t>(num_dst);
  const int num_bits = std::max(static_cast<int>(std::bit_width(num_codes)), 1);
  // Parts in which equal edges meet, and which fit the cache next to a core.
  const int part_bits =
      std::min(static_cast<int>(std::bit_width(
                   static_cast<uint64_t>(std::clamp<int64_t>(num_edges / 49152, 1, 4096)) - 1)),
               num_bits);
  const auto count = [&](auto* count_codes) {
    return count_codes(src, dst, num_edges, num_dst, num_bits, part_bits, num_threads);
  };
  return num_bits - part_bits <= 32 ? count(&count_repeated_codes<uint32_t, Id>)
                                    : count(&count_repeated_codes<uint64_t, Id>);
}

template int64_t count_repeated(const int32_t*, const int32_t*, int64_t, int64_t, int64_t, int);
template int64_t count_repeated(const int64_t*, const int64_t*, int64_t, int64_t, int64_t, int);

}  // namespace graphshard
