// SPDX-License-Identifier: Apache-2.0
// Value types, operator names and the shape of a row, shared by all kernels.

#pragma once

#include <bit>
#include <cstdint>

// A hot function is compiled once per instruction set and chosen when the library is loaded, so one
// binary runs on any x86-64 and uses what the machine has. It must live in an unnamed namespace.
// Sanitizers look at one version, with nothing inlined by force: they find the same in any, and
// what they add to each access takes long to compile.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(__SANITIZE_ADDRESS__)
#define GRAPHSHARD_HAS_CLONES
#define GRAPHSHARD_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#define GRAPHSHARD_HOT_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define GRAPHSHARD_CLONES
#define GRAPHSHARD_HOT_CLONES
#endif

#if defined(_MSC_VER)
#define GRAPHSHARD_INLINE inline __forceinline
#define GRAPHSHARD_INLINE_LAMBDA
#define GRAPHSHARD_PREFETCH(address)
#define GRAPHSHARD_PREFETCH_WRITE(address)
#define GRAPHSHARD_PREFETCH_OUTER(address)
#else
#if defined(__SANITIZE_ADDRESS__)
#define GRAPHSHARD_INLINE inline
#define GRAPHSHARD_INLINE_LAMBDA
#else
#define GRAPHSHARD_INLINE inline __attribute__((always_inline))
#define GRAPHSHARD_INLINE_LAMBDA __attribute__((always_inline))
#endif
// [Note: prefetch to the second level] Into the second-level cache, not the first: a core tracks
// few lines on their way to the first and many on their way to the second, so whole rows can be
// asked for well ahead. On a Zen 4 this halved the time of a sum over edges.
#define GRAPHSHARD_PREFETCH(address) __builtin_prefetch(address, 0, 2)
#define GRAPHSHARD_PREFETCH_WRITE(address) __builtin_prefetch(address, 1)
// To the outer caches only: a stream of these does not hold up the computation it runs beside.
#define GRAPHSHARD_PREFETCH_OUTER(address) __builtin_prefetch(address, 0, 1)
#endif

namespace graphshard {

// Requests the lines that hold [begin, begin + bytes).
GRAPHSHARD_INLINE void prefetch_bytes(const void* begin, int64_t bytes) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin);
  for (uintptr_t at = first & ~uintptr_t{63}; at < first + bytes; at += 64) {
    GRAPHSHARD_PREFETCH(reinterpret_cast<const void*>(at));
  }
}

// The upper half of a float: stored as such, computed with as float.
struct bfloat16 {
  uint16_t bits;
};

enum class Op { kAdd, kSub, kMul, kDiv, kDot, kCopyLhs, kCopyRhs };
enum class Reduce { kSum, kAdd, kMean, kMax, kMin };
enum class Target { kSrc, kDst, kEdge };

// How one row of lhs and one row of rhs combine: `outer` times a loop of `inner` steps, in which an
// operand advances or stays at its offset. One row of the result has outer * inner elements, or
// `outer` for a dot product.
struct RowLoop {
  int64_t outer;
  int64_t inner;
  const int64_t* lhs_offsets;
  const int64_t* rhs_offsets;
  int64_t lhs_step;  // 1 or 0
  int64_t rhs_step;
};

// Ids of 32 or 64 bits behind one type. Loops that spend their time on rows of features are
// compiled for this, once, and not for either width; the branch always goes the same way.
class Ids {
 public:
  Ids() = default;
  explicit Ids(const int32_t* ids) : data_(ids), wide_(false) {}
  explicit Ids(const int64_t* ids) : data_(ids), wide_(true) {}

  GRAPHSHARD_INLINE int64_t operator[](int64_t i) const {
    return wide_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }
  GRAPHSHARD_INLINE explicit operator bool() const { return data_ != nullptr; }

  // The array, if it is of that width; null otherwise.
  GRAPHSHARD_INLINE const int64_t* wide() const {
    return wide_ ? static_cast<const int64_t*>(data_) : nullptr;
  }
  GRAPHSHARD_INLINE const int32_t* narrow() const {
    return wide_ ? nullptr : static_cast<const int32_t*>(data_);
  }

 private:
  const void* data_ = nullptr;
  bool wide_ = false;
};

// Likewise, to write to.
class WritableIds {
 public:
  explicit WritableIds(int32_t* ids) : data_(ids), wide_(false) {}
  explicit WritableIds(int64_t* ids) : data_(ids), wide_(true) {}

  GRAPHSHARD_INLINE void set(int64_t i, int64_t id) const {
    if (wide_) {
      static_cast<int64_t*>(data_)[i] = id;
    } else {
      static_cast<int32_t*>(data_)[i] = static_cast<int32_t>(id);
    }
  }

 private:
  void* data_;
  bool wide_;
};

// In-edges grouped by destination. Without `eids`, an edge's position is its id.
template <typename I>
struct Csc {
  const I* indptr;
  const I* indices;
  const I* eids;
  int64_t num_rows;
  int64_t num_edges;

  GRAPHSHARD_INLINE int64_t edge_id(int64_t position) const {
    return eids == nullptr ? position : static_cast<int64_t>(eids[position]);
  }
};

// Rows of `width` elements each.
template <typename T>
struct Rows {
  const T* data;
  int64_t width;

  GRAPHSHARD_INLINE const T* operator[](int64_t row) const { return data + row * width; }
};

// The type in which values of T are computed with and summed.
template <typename T>
struct Wide {
  using type = T;
};
template <>
struct Wide<bfloat16> {
  using type = float;
};
template <typename T>
using wide_t = typename Wide<T>::type;

GRAPHSHARD_INLINE float widen(float value) { return value; }
GRAPHSHARD_INLINE double widen(double value) { return value; }
GRAPHSHARD_INLINE float widen(bfloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

GRAPHSHARD_INLINE void narrow(float value, float& out) { out = value; }
GRAPHSHARD_INLINE void narrow(double value, double& out) { out = value; }
GRAPHSHARD_INLINE void narrow(float value, bfloat16& out) {
  // Round to nearest, ties to even; any NaN becomes the quiet one.
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out.bits = static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

}  // namespace graphshard
