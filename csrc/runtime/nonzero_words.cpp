// SPDX-License-Identifier: Apache-2.0
#include "runtime/nonzero_words.h"

#include <algorithm>

#include "simd/dispatch.h"

namespace graphshard {
namespace {

constexpr int64_t kBlock = 64;     // words of one word of bits
constexpr int64_t kSamples = 256;  // blocks that are looked at first

GRAPHSHARD_INLINE int64_t count_bits(uint64_t bits) { return __builtin_popcountll(bits); }

template <typename Word>
GRAPHSHARD_INLINE int64_t zeros_of_block(const Word* words) {
  int64_t zeros = 0;
  for (int64_t j = 0; j < kBlock; ++j) zeros += words[j] == 0;
  return zeros;
}

// Whether one in four words of blocks that lie evenly apart is zero.
template <typename Word>
GRAPHSHARD_INLINE bool has_many_zeros(const Word* words, int64_t num_words) {
  const int64_t blocks = num_words / kBlock;
  const int64_t samples = std::min(blocks, kSamples);
  int64_t zeros = 0;
  for (int64_t i = 0; i < samples; ++i) {
    zeros += zeros_of_block(words + blocks * i / samples * kBlock);
  }
  return samples > 0 && 4 * zeros >= samples * kBlock;
}

// Every word is written, and the next in its place where it is zero: no branch to be guessed.
template <typename Word>
GRAPHSHARD_INLINE uint64_t pack_block(const Word* words, int64_t count, Word*& to) {
  uint64_t bits = 0;
  for (int64_t j = 0; j < count; ++j) {
    const uint64_t is_kept = words[j] != 0;
    *to = words[j];
    to += is_kept;
    bits |= is_kept << j;
  }
  return bits;
}

template <typename Word>
GRAPHSHARD_INLINE int64_t pack(const Word* words, int64_t num_words, Word* packed, uint64_t* bits) {
  if (!has_many_zeros(words, num_words)) return -1;
  const int64_t most = most_kept(num_words);
  Word* to = packed;
  for (int64_t first = 0; first < num_words; first += kBlock) {
    if (to - packed > most) return -1;
    *bits++ = pack_block(words + first, std::min(kBlock, num_words - first), to);
  }
  return to - packed <= most ? to - packed : -1;
}

// From the last word to the first: a word that is kept never lies behind its place.
template <bool kEnds, typename Word>
GRAPHSHARD_INLINE int64_t unpack_block(Word* words, int64_t first, int64_t count, uint64_t kept,
                                       int64_t last) {
  for (int64_t j = count - 1; j >= 0; --j) {
    const uint64_t is_kept = kept >> j & 1;
    const Word word = kEnds && last < 0 ? Word{0} : words[last];
    words[first + j] = static_cast<Word>(word & (uint64_t{0} - is_kept));  // without a branch
    last -= static_cast<int64_t>(is_kept);
  }
  return last;
}

template <typename Word>
GRAPHSHARD_INLINE void unpack(Word* words, int64_t num_words, int64_t count, const uint64_t* bits) {
  int64_t last = count - 1;
  for (int64_t first = (num_words - 1) / kBlock * kBlock; first >= 0; first -= kBlock) {
    const int64_t in_block = std::min(kBlock, num_words - first);
    const uint64_t kept = bits[first / kBlock];
    // The word before the first one is not read.
    last = last >= kBlock ? unpack_block<false>(words, first, in_block, kept, last)
                          : unpack_block<true>(words, first, in_block, kept, last);
  }
}

}  // namespace

template <typename Word>
int64_t pack_words(const Word* words, int64_t num_words, Word* packed, uint64_t* bits) {
  int64_t count = -1;
  dispatch<64>([&](auto)
                   GRAPHSHARD_INLINE_LAMBDA { count = pack(words, num_words, packed, bits); });
  return count;
}

template <typename Word>
bool unpack_words(Word* words, int64_t num_words, int64_t count, const uint64_t* bits) {
  int64_t found = 0;
  for (int64_t i = 0; i < bit_bytes(num_words) / 8; ++i) found += count_bits(bits[i]);
  const int64_t in_last = num_words % kBlock;
  const bool ends = in_last == 0 || bits[num_words / kBlock] >> in_last == 0;
  if (found != count || !ends) return false;
  dispatch<64>([&](auto) GRAPHSHARD_INLINE_LAMBDA { unpack(words, num_words, count, bits); });
  return true;
}

#define INSTANTIATE(Word)                                              \
  template int64_t pack_words(const Word*, int64_t, Word*, uint64_t*); \
  template bool unpack_words(Word*, int64_t, int64_t, const uint64_t*);
INSTANTIATE(uint8_t)
INSTANTIATE(uint16_t)
INSTANTIATE(uint32_t)
#undef INSTANTIATE

}  // namespace graphshard
