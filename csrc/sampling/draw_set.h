// SPDX-License-Identifier: Apache-2.0
// k of d numbers without replacement, ascending, as a function of a state of random.h.
//
// [Note: sets without replacement] Floyd's algorithm makes a set of k of d numbers in k steps: step
// i draws t from [0, d - k + i], and takes d - k + i if t is in the set already. A set has one
// ascending order, so how membership is told and how the set is sorted is free to depend on k and
// d: the bits of one word (also sorts), comparing all pairs in vectors, a bitmap, or a hash table.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "runtime/types.h"
#include "sampling/random.h"

namespace graphshard {

inline constexpr int32_t kFew = 32;
inline constexpr int32_t kLanes = 8;

// d <= 64. Writes base + number for each number of the set, ascending.
template <typename I>
GRAPHSHARD_INLINE void draw_word(uint64_t state, int32_t d, int32_t k, I base, I* out) {
  uint64_t set = 0;
  for (int32_t i = 0; i < k; ++i) {
    const uint32_t last = static_cast<uint32_t>(d - k + i);
    const uint32_t drawn = below(word_of(state, static_cast<uint64_t>(i)), last + 1);
    const uint64_t known = set >> drawn & 1;  // a branch on it would be a coin toss
    set |= uint64_t{1} << drawn | known << last;
  }
  for (int32_t i = 0; i < k; ++i) {
    out[i] = base + static_cast<I>(std::countr_zero(set));
    set &= set - 1;
  }
}

#if defined(__GNUC__)
typedef int32_t Lanes __attribute__((vector_size(4 * kLanes)));
#else
struct Lanes {
  int32_t lane[kLanes];
};
#endif

// rank[i] = how many of numbers[0, count) are smaller than numbers[i]; returns their sum, which is
// count (count - 1) / 2 unless numbers repeat. Both arrays have a multiple of kLanes entries.
template <int32_t kVectors>
GRAPHSHARD_INLINE int32_t rank_numbers(const int32_t* numbers, int32_t count, int32_t* rank) {
#if defined(__GNUC__)
  Lanes own[kVectors];
  Lanes smaller[kVectors];
  for (int32_t v = 0; v < kVectors; ++v) {
    std::memcpy(&own[v], numbers + v * kLanes, sizeof(Lanes));
    smaller[v] = Lanes{};
  }
  for (int32_t j = 0; j < count; ++j) {
    const Lanes other = Lanes{} + numbers[j];
    for (int32_t v = 0; v < kVectors; ++v) smaller[v] -= other < own[v];
  }
  for (int32_t v = 0; v < kVectors; ++v) std::memcpy(rank + v * kLanes, &smaller[v], sizeof(Lanes));
#else
  for (int32_t i = 0; i < kVectors * kLanes; ++i) {
    rank[i] = 0;
    for (int32_t j = 0; j < count; ++j) rank[i] += numbers[j] < numbers[i] ? 1 : 0;
  }
#endif
  int32_t sum = 0;
  for (int32_t i = 0; i < count; ++i) sum += rank[i];
  return sum;
}

// k <= kVectors * kLanes. Draws as if nothing were drawn twice, and again with care if it was.
template <int32_t kVectors, typename I>
GRAPHSHARD_INLINE void draw_few(uint64_t state, int32_t d, int32_t k, I base, I* out) {
  constexpr int32_t kMost = kVectors * kLanes;
  alignas(32) int32_t numbers[kMost];
  alignas(32) int32_t rank[kMost];
  for (int32_t i = k; i < kMost; ++i) numbers[i] = 0;
  for (int32_t i = 0; i < k; ++i) {
    numbers[i] = static_cast<int32_t>(
        below(word_of(state, static_cast<uint64_t>(i)), static_cast<uint32_t>(d - k + i + 1)));
  }
  if (rank_numbers<kVectors>(numbers, k, rank) != k * (k - 1) / 2) {
    for (int32_t i = 1; i < k; ++i) {
      bool known = false;
      for (int32_t j = 0; j < i; ++j) known |= numbers[j] == numbers[i];
      numbers[i] = known ? d - k + i : numbers[i];
    }
    rank_numbers<kVectors>(numbers, k, rank);
  }
  for (int32_t i = 0; i < k; ++i) out[rank[i]] = base + static_cast<I>(numbers[i]);
}

// As draw_word, with as many words as it takes.
template <typename I>
GRAPHSHARD_INLINE void draw_bitmap(uint64_t state, int32_t d, int32_t k, I base, I* out,
                                   std::vector<uint64_t>& bits) {
  const size_t num_words = (static_cast<size_t>(d) + 63) / 64;
  bits.assign(num_words, 0);
  uint64_t* set = bits.data();
  for (int32_t i = 0; i < k; ++i) {
    const uint32_t last = static_cast<uint32_t>(d - k + i);
    const uint32_t drawn = below(word_of(state, static_cast<uint64_t>(i)), last + 1);
    const uint64_t known = set[drawn / 64] >> (drawn % 64) & 1;
    set[drawn / 64] |= uint64_t{1} << (drawn % 64);
    set[last / 64] |= known << (last % 64);
  }
  for (size_t w = 0; w < num_words; ++w) {
    const I first = base + static_cast<I>(w * 64);
    for (uint64_t word = set[w]; word != 0; word &= word - 1) {
      *out++ = first + static_cast<I>(std::countr_zero(word));
    }
  }
}

// For many of very many: a hash table with at least two places per number, then a sort.
template <typename I>
void draw_hashed(uint64_t state, int32_t d, int32_t k, I base, I* out,
                 std::vector<uint64_t>& bits) {
  const int log = std::bit_width(static_cast<uint32_t>(k)) + 1;
  const uint32_t mask = (uint32_t{1} << log) - 1;
  bits.assign((size_t{mask} + 2) / 2, std::numeric_limits<uint64_t>::max());
  uint32_t* places = reinterpret_cast<uint32_t*>(bits.data());
  constexpr uint32_t kFree = std::numeric_limits<uint32_t>::max();
  const auto place_of = [&](uint32_t number) {
    uint32_t at = static_cast<uint32_t>(number * kGamma >> 32) & mask;
    while (places[at] != kFree && places[at] != number) at = (at + 1) & mask;
    return at;
  };
  for (int32_t i = 0; i < k; ++i) {
    const uint32_t last = static_cast<uint32_t>(d - k + i);
    uint32_t number = below(word_of(state, static_cast<uint64_t>(i)), last + 1);
    uint32_t at = place_of(number);
    if (places[at] == number) {
      number = last;
      at = place_of(last);
    }
    places[at] = number;
    out[i] = base + static_cast<I>(number);
  }
  std::sort(out, out + k);
}

// k of d without replacement, 0 < k < d, ascending.
template <typename I>
GRAPHSHARD_INLINE void draw_set(uint64_t state, int32_t d, int32_t k, I base, I* out,
                                std::vector<uint64_t>& bits) {
  if (d <= 64) {
    draw_word(state, d, k, base, out);
  } else if (k <= kLanes) {
    draw_few<1>(state, d, k, base, out);
  } else if (k <= 2 * kLanes && d > 256) {
    draw_few<2>(state, d, k, base, out);
  } else if (k <= kFew && d > 1024) {
    draw_few<4>(state, d, k, base, out);
  } else if (d / 256 <= k) {
    draw_bitmap(state, d, k, base, out, bits);
  } else {
    draw_hashed(state, d, k, base, out, bits);
  }
}

}  // namespace graphshard
