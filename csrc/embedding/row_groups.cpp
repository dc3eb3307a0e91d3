// SPDX-License-Identifier: Apache-2.0

#include "embedding/row_groups.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <stdexcept>
#include <type_traits>

#include "runtime/parallel.h"
#include "simd/dispatch.h"

namespace graphshard {
namespace {

constexpr int kDigitBits = 11;
constexpr int64_t kAhead = 8;  // groups between the one that is asked for and the one added up
constexpr int64_t kTaskBytes = 1 << 18;

// Sorts words by their bits [low, high), stably: a counting sort for each digit.
void sort_by_bits(std::vector<uint64_t>& words, int low, int high) {
  constexpr uint64_t kMask = (uint64_t{1} << kDigitBits) - 1;
  std::vector<uint64_t> other(words.size());
  for (int shift = low; shift < high; shift += kDigitBits) {
    std::array<size_t, kMask + 1> next{};
    for (const uint64_t word : words) ++next[(word >> shift) & kMask];
    size_t begin = 0;
    for (size_t& count : next) {
      const size_t size = count;
      count = begin;
      begin += size;
    }
    for (const uint64_t word : words) other[next[(word >> shift) & kMask]++] = word;
    words.swap(other);
  }
}

// The places of ids in the order of ids, and of places where ids are equal.
template <typename I>
void sorted_places(const I* ids, int64_t num_ids, int64_t* order) {
  using U = std::make_unsigned_t<I>;
  const auto [low, high] = std::minmax_element(ids, ids + num_ids);
  const I least = *low;
  const auto distance = [&](I id) {
    return static_cast<uint64_t>(static_cast<U>(static_cast<U>(id) - static_cast<U>(least)));
  };
  const int place_bits = std::bit_width(static_cast<uint64_t>(num_ids - 1));
  const int id_bits = std::bit_width(distance(*high));
  if (place_bits + id_bits > 64) {
    std::iota(order, order + num_ids, int64_t{0});
    std::stable_sort(order, order + num_ids, [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
    return;
  }
  std::vector<uint64_t> words(static_cast<size_t>(num_ids));
  for (int64_t i = 0; i < num_ids; ++i) {
    words[static_cast<size_t>(i)] = distance(ids[i]) << place_bits | static_cast<uint64_t>(i);
  }
  sort_by_bits(words, place_bits, place_bits + id_bits);
  const uint64_t mask = (uint64_t{1} << place_bits) - 1;
  for (int64_t i = 0; i < num_ids; ++i) {
    order[i] = static_cast<int64_t>(words[static_cast<size_t>(i)] & mask);
  }
}

}  // namespace

template <typename I>
int64_t group_equal(const I* ids, int64_t num_ids, I* distinct, int64_t* starts, int64_t* order) {
  if (num_ids > 0) sorted_places(ids, num_ids, order);
  int64_t num_groups = 0;
  for (int64_t i = 0; i < num_ids; ++i) {
    const I id = ids[order[i]];
    if (num_groups > 0 && distinct[num_groups - 1] == id) continue;
    distinct[num_groups] = id;
    starts[num_groups++] = i;
  }
  starts[num_groups] = num_ids;
  return num_groups;
}

template int64_t group_equal(const int32_t*, int64_t, int32_t*, int64_t*, int64_t*);
template int64_t group_equal(const int64_t*, int64_t, int64_t*, int64_t*, int64_t*);

void check_groups(const RowGroups& groups, int64_t num_numbers) {
  bool is_right = groups.starts[0] >= 0 && groups.starts[groups.num_groups] <= num_numbers;
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    is_right &= groups.starts[g] <= groups.starts[g + 1];
  }
  if (!is_right) throw std::out_of_range("starts must ascend, within order");
  for (int64_t i = groups.starts[0]; i < groups.starts[groups.num_groups]; ++i) {
    is_right &= groups.order[i] >= 0 && groups.order[i] < groups.num_rows;
  }
  if (!is_right) throw std::out_of_range("order must hold numbers of rows");
}

void sum_groups(float* out, int64_t out_stride, const RowGroups& groups, int num_threads) {
  const size_t row_bytes = static_cast<size_t>(groups.width) * sizeof(float);
  const int64_t grain = kTaskBytes / static_cast<int64_t>(row_bytes + 1) + 1;
  const int64_t parts = num_parts(groups.num_groups, grain, num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    std::vector<float> room(static_cast<size_t>(2 * groups.width));
    dispatch<64>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
      const int64_t last = part_begin(groups.num_groups, part + 1, parts);
      for (int64_t g = part_begin(groups.num_groups, part, parts); g < last; ++g) {
        if (g + kAhead < last) prefetch_group(groups, g + kAhead);
        std::memcpy(out + g * out_stride, sum_of(groups, g, room.data()), row_bytes);
      }
    });
  });
}

}  // namespace graphshard
