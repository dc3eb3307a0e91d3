// SPDX-License-Identifier: Apache-2.0

#include "tables/key_tables.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>

#include "runtime/parallel.h"
#include "runtime/types.h"

namespace graphshard {
namespace {

constexpr int64_t kAhead = 16;
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

}  // namespace

// ---- integers

void IntegerTable::find(const int64_t* keys, int64_t count, int64_t* rows) const {
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
  const Slot* slots = slots_.data();
  const uint64_t mask = slots_.size() - 1;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) GRAPHSHARD_PREFETCH(slots + place_of(keys[i + kAhead]));
    uint64_t place = place_of(keys[i]);
    while (slots[place].row >= 0 && slots[place].key != keys[i]) place = (place + 1) & mask;
    rows[i] = slots[place].row;
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
  std::vector<int32_t> table(static_cast<size_t>(to - from + 1), -1);
  for (int64_t row = 0; row < size(); ++row) {
    table[static_cast<size_t>(keys_[static_cast<size_t>(row)] - from)] = static_cast<int32_t>(row);
  }
  direct_ = std::move(table);
  first_ = from;
  return true;
}

void IntegerTable::use_hash(int64_t num_keys) {
  is_direct_ = false;
  direct_ = {};
  const int64_t num_slots = slots_for(num_keys);
  if (num_slots <= static_cast<int64_t>(slots_.size())) return;
  slots_.assign(static_cast<size_t>(num_slots), Slot{0, -1});
  shift_ = shift_for(num_slots);
  const uint64_t mask = static_cast<uint64_t>(num_slots) - 1;
  for (int64_t row = 0; row < size(); ++row) {
    if (row + kAhead < size()) {
      GRAPHSHARD_PREFETCH_WRITE(&slots_[place_of(keys_[static_cast<size_t>(row + kAhead)])]);
    }
    const int64_t key = keys_[static_cast<size_t>(row)];
    uint64_t place = place_of(key);
    while (slots_[place].row >= 0) place = (place + 1) & mask;
    slots_[place] = {key, row};
  }
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
    if (is_full(size() + kBlock, slots_.size())) use_hash(size() + kBlock);
    const uint64_t mask = slots_.size() - 1;
    for (int64_t i = begin; i < end; ++i) GRAPHSHARD_PREFETCH_WRITE(&slots_[place_of(keys[i])]);
    for (int64_t i = begin; i < end; ++i) {
      uint64_t place = place_of(keys[i]);
      while (slots_[place].row >= 0 && slots_[place].key != keys[i]) place = (place + 1) & mask;
      if (slots_[place].row < 0) {
        slots_[place] = {keys[i], size()};
        keys_.push_back(keys[i]);
      }
      rows[i] = slots_[place].row;
    }
  }
}

// ---- bytes

bool BytesTable::is_key(int64_t row, const uint8_t* text, int64_t length) const {
  const int64_t begin = offsets_[static_cast<size_t>(row)];
  return offsets_[static_cast<size_t>(row) + 1] - begin == length &&
         (length == 0 || std::memcmp(data_.data() + begin, text, static_cast<size_t>(length)) == 0);
}

int64_t BytesTable::row_of(uint64_t hash, const uint8_t* text, int64_t length) const {
  const uint64_t mask = slots_.size() - 1;
  const uint32_t tag = static_cast<uint32_t>(hash);
  uint64_t place = hash >> shift_;
  while (slots_[place].next_row != 0) {
    const int64_t row = static_cast<int64_t>(slots_[place].next_row) - 1;
    if (slots_[place].tag == tag && is_key(row, text, length)) return row;
    place = (place + 1) & mask;
  }
  return -1;
}

void BytesTable::find(const int64_t* offsets, const uint8_t* data, int64_t count,
                      int64_t* rows) const {
  if (slots_.empty()) {
    std::fill(rows, rows + count, -1);
    return;
  }
  const uint64_t mask = slots_.size() - 1;
  uint64_t hashes[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t at = offsets[begin + i];
      hashes[i] = hash_of(data + at, offsets[begin + i + 1] - at);
      GRAPHSHARD_PREFETCH(&slots_[hashes[i] >> shift_]);
    }
    // What has the same tag is, but for one case in 2^32, the same text.
    for (int64_t i = 0; i < size; ++i) {
      const uint32_t tag = static_cast<uint32_t>(hashes[i]);
      uint64_t place = hashes[i] >> shift_;
      while (slots_[place].next_row != 0 && slots_[place].tag != tag) place = (place + 1) & mask;
      const int64_t row = static_cast<int64_t>(slots_[place].next_row) - 1;
      rows[begin + i] = row;
      if (row >= 0) GRAPHSHARD_PREFETCH(&offsets_[static_cast<size_t>(row)]);
    }
    for (int64_t i = 0; i < size; ++i) {
      const int64_t row = rows[begin + i];
      if (row >= 0) GRAPHSHARD_PREFETCH(data_.data() + offsets_[static_cast<size_t>(row)]);
    }
    for (int64_t i = 0; i < size; ++i) {
      const int64_t row = rows[begin + i];
      const uint8_t* text = data + offsets[begin + i];
      const int64_t length = offsets[begin + i + 1] - offsets[begin + i];
      if (row >= 0 && !is_key(row, text, length)) {
        rows[begin + i] = row_of(hashes[i], text, length);
      }
    }
  }
}

// Room for so many keys.
void BytesTable::reserve(int64_t num_keys) {
  if (num_keys >= std::numeric_limits<uint32_t>::max()) {
    throw std::invalid_argument("a table holds fewer than 2^32 texts");
  }
  if (!is_full(num_keys, slots_.size())) return;
  const int64_t num_slots = slots_for(num_keys);
  slots_.assign(static_cast<size_t>(num_slots), Slot{0, 0});
  shift_ = shift_for(num_slots);
  const uint64_t mask = static_cast<uint64_t>(num_slots) - 1;
  uint64_t hashes[kBlock];
  for (int64_t begin = 0; begin < size(); begin += kBlock) {
    const int64_t number = std::min(kBlock, size() - begin);
    for (int64_t i = 0; i < number; ++i) {
      const int64_t at = offsets_[static_cast<size_t>(begin + i)];
      hashes[i] = hash_of(data_.data() + at, offsets_[static_cast<size_t>(begin + i) + 1] - at);
      GRAPHSHARD_PREFETCH_WRITE(&slots_[hashes[i] >> shift_]);
    }
    for (int64_t i = 0; i < number; ++i) {
      uint64_t place = hashes[i] >> shift_;
      while (slots_[place].next_row != 0) place = (place + 1) & mask;
      slots_[place] = {static_cast<uint32_t>(hashes[i]), static_cast<uint32_t>(begin + i + 1)};
    }
  }
}

void BytesTable::insert(const int64_t* offsets, const uint8_t* data, int64_t count, int64_t* rows) {
  uint64_t hashes[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t number = std::min(kBlock, count - begin);
    reserve(size() + kBlock);
    const uint64_t mask = slots_.size() - 1;
    for (int64_t i = 0; i < number; ++i) {
      const int64_t at = offsets[begin + i];
      hashes[i] = hash_of(data + at, offsets[begin + i + 1] - at);
      GRAPHSHARD_PREFETCH_WRITE(&slots_[hashes[i] >> shift_]);
    }
    for (int64_t i = 0; i < number; ++i) {
      const uint8_t* text = data + offsets[begin + i];
      const int64_t length = offsets[begin + i + 1] - offsets[begin + i];
      const uint32_t tag = static_cast<uint32_t>(hashes[i]);
      uint64_t place = hashes[i] >> shift_;
      while (slots_[place].next_row != 0 &&
             !(slots_[place].tag == tag &&
               is_key(static_cast<int64_t>(slots_[place].next_row) - 1, text, length))) {
        place = (place + 1) & mask;
      }
      if (slots_[place].next_row == 0) {
        slots_[place] = {tag, static_cast<uint32_t>(size() + 1)};
        data_.insert(data_.end(), text, text + length);
        offsets_.push_back(static_cast<int64_t>(data_.size()));
      }
      rows[begin + i] = static_cast<int64_t>(slots_[place].next_row) - 1;
    }
  }
}

// ---- cells

ParsedIntegers parse_integers(const int64_t* offsets, const uint8_t* data, int64_t count,
                              int64_t* out) {
  constexpr uint64_t kLargest = std::numeric_limits<uint64_t>::max();
  constexpr uint64_t kTop = uint64_t{1} << 63;
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
    for (; at < end; ++at) {
      const uint64_t digit = static_cast<uint64_t>(*at) - '0';
      if (digit > 9 || value > kLargest / 10 || (value == kLargest / 10 && digit > kLargest % 10)) {
        parsed.are_integers = false;
        return parsed;
      }
      value = 10 * value + digit;
    }
    if (is_negative ? value > kTop : false) {
      parsed.are_integers = false;
      return parsed;
    }
    parsed.has_negative |= is_negative;
    parsed.has_large |= !is_negative && value >= kTop;
    out[i] = static_cast<int64_t>(is_negative ? ~value + 1 : value);
  }
  return parsed;
}

// ---- edges

int64_t count_repeated(const int64_t* src, const int64_t* dst, int64_t num_edges, int64_t num_dst,
                       int num_threads) {
  if (num_edges < 2) return 0;
  // Parts in which equal edges meet, and which fit the cache next to a core.
  const int64_t parts = static_cast<int64_t>(
      std::bit_ceil(static_cast<uint64_t>(std::clamp<int64_t>(num_edges >> 15, 1, 4096))));
  const int shift = parts == 1 ? 63 : shift_for(parts);
  const auto code_of = [&](int64_t i) {
    return static_cast<uint64_t>(src[i]) * static_cast<uint64_t>(num_dst) +
           static_cast<uint64_t>(dst[i]);
  };
  const auto part_of = [&](uint64_t code) { return parts == 1 ? 0 : code * kFactor >> shift; };
  std::vector<int64_t> starts(static_cast<size_t>(parts) + 1, 0);
  for (int64_t i = 0; i < num_edges; ++i) ++starts[part_of(code_of(i)) + 1];
  for (int64_t part = 0; part < parts; ++part) {
    starts[static_cast<size_t>(part) + 1] += starts[static_cast<size_t>(part)];
  }
  std::vector<int64_t> next(starts.begin(), starts.end() - 1);
  // Not a vector, which would write zeros first.
  const std::unique_ptr<uint64_t[]> codes(new uint64_t[static_cast<size_t>(num_edges)]);
  for (int64_t i = 0; i < num_edges; ++i) {
    const uint64_t code = code_of(i);
    codes[static_cast<size_t>(next[part_of(code)]++)] = code;
  }
  std::vector<int64_t> repeated(static_cast<size_t>(parts), 0);
  run_tasks(parts, num_threads, [&](int64_t part) {
    const int64_t begin = starts[static_cast<size_t>(part)];
    const int64_t end = starts[static_cast<size_t>(part) + 1];
    const int64_t num_slots = slots_for(end - begin);
    const int table_shift = shift_for(num_slots);
    const uint64_t mask = static_cast<uint64_t>(num_slots) - 1;
    constexpr uint64_t kEmpty = std::numeric_limits<uint64_t>::max();
    std::vector<uint64_t> table(static_cast<size_t>(num_slots), kEmpty);
    int64_t number = 0;
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t code = codes[static_cast<size_t>(i)];
      uint64_t place = mixed(code) >> table_shift;
      while (table[place] != kEmpty && table[place] != code) place = (place + 1) & mask;
      number += table[place] == code ? 1 : 0;
      table[place] = code;
    }
    repeated[static_cast<size_t>(part)] = number;
  });
  int64_t total = 0;
  for (const int64_t number : repeated) total += number;
  return total;
}

}  // namespace graphshard
