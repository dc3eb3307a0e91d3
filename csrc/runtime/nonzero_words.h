// SPDX-License-Identifier: Apache-2.0
// Words of a message that are not zero, and one bit a word that says where they lie. Rows that come
// out of a ReLU or a dropout are half of zeros, and more; rows of bags of words are little else.

#pragma once

#include <cstdint>

namespace graphshard {

// Bytes of the bits of so many words: one each, in whole words of 64.
inline constexpr int64_t bit_bytes(int64_t num_words) { return (num_words + 63) / 64 * 8; }

// Words of `packed` that pack_words may write: those that are kept, and one more.
inline constexpr int64_t most_kept(int64_t num_words) { return num_words / 8 * 7; }

// Writes the words that are not zero to the beginning of `packed`, in order, and to `bits` which
// they are. Returns how many, or -1 where that would be more than most_kept(num_words), or where a
// sample of the words has fewer zeros than one in four: what was written then is of no use.
// `packed` has room for most_kept(num_words) + 64 words.
template <typename Word>
int64_t pack_words(const Word* words, int64_t num_words, Word* packed, uint64_t* bits);

// The reverse, in place: `words` begins with `count` words that are not zero. Returns false, and
// has written nothing, where `bits` tells of another number of words.
template <typename Word>
bool unpack_words(Word* words, int64_t num_words, int64_t count, const uint64_t* bits);

}  // namespace graphshard
