// SPDX-License-Identifier: Apache-2.0
// What the files of bindings share.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "runtime/structure.h"
#include "runtime/types.h"

template <>
struct nanobind::detail::dtype_traits<graphshard::bfloat16> {
  static constexpr dlpack::dtype value{static_cast<uint8_t>(dlpack::dtype_code::Bfloat), 16, 1};
  static constexpr auto name = const_name("bfloat16");
};

namespace graphshard {

// Every array that a kernel gets is one of these. A torch tensor may be a view that has put off a
// negation: its memory holds the numbers with the other sign, and DLPack does not say so. And it
// may begin anywhere in a file. To read, such a tensor is copied first; to write into, it is
// refused.
template <typename... Args>
class Array : public nanobind::ndarray<Args...> {
 public:
  Array() = default;
  explicit Array(const nanobind::ndarray<Args...>& other) : nanobind::ndarray<Args...>(other) {}
};

template <typename T>
using Matrix = Array<T, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T>
using Vector = Array<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T>
using MaybeMatrix = std::optional<Matrix<const T>>;
template <typename T>
using MaybeVector = std::optional<Vector<const T>>;

inline void require(bool condition, const char* rule) {
  if (!condition) throw std::invalid_argument(rule);
}

// The memory of an array, from its first byte to the one behind its last.
struct Extent {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  Extent() = default;
  template <typename... Args>
  Extent(const Array<Args...>& array) {  // NOLINT: arrays are given as they are
    int64_t low = 0;
    int64_t high = 1;
    for (size_t axis = 0; axis < array.ndim(); ++axis) {
      if (array.shape(axis) == 0) return;
      const int64_t reach = (static_cast<int64_t>(array.shape(axis)) - 1) * array.stride(axis);
      (reach < 0 ? low : high) += reach;
    }
    const uintptr_t first = reinterpret_cast<uintptr_t>(array.data());
    begin = first + low * static_cast<int64_t>(array.itemsize());
    end = first + high * static_cast<int64_t>(array.itemsize());
  }
  template <typename A>
  Extent(const std::optional<A>& array) {  // NOLINT
    if (array) *this = Extent(*array);
  }
};

// What is written must not lie where something else is written, or where ids are read: they are
// looked at before, or while, others are written.
inline void require_apart(std::initializer_list<Extent> written,
                          std::initializer_list<Extent> read) {
  for (const Extent* one = written.begin(); one != written.end(); ++one) {
    const auto is_apart = [&](const Extent& other) {
      return other.begin >= one->end || one->begin >= other.end;
    };
    const char* rule = "arrays that are written must not overlap others";
    for (const Extent* other = one + 1; other != written.end(); ++other) {
      require(is_apart(*other), rule);
    }
    for (const Extent& other : read) require(is_apart(other), rule);
  }
}

// What walks over edges take for granted of the array where each row's edges begin and end. What
// ids are behind it is checked where a structure is made, by ops/_adjacency.py.
template <typename I>
void require_pointers(const Vector<const I>& indptr, size_t num_edges) {
  require(indptr.shape(0) > 0, "indptr must not be empty");
  require(num_edges <= static_cast<size_t>(std::numeric_limits<I>::max()),
          "there must be no more edges than the type of ids can tell apart");
  const nanobind::gil_scoped_release release;
  require(ascends(indptr.data(), static_cast<int64_t>(indptr.shape(0)) - 1,
                  static_cast<int64_t>(num_edges)),
          "indptr must ascend from 0 to num_edges");
}

// Blocks for large results.
void bind_memory(nanobind::module_& m);
// Attention over in-edges.
void bind_attention(nanobind::module_& m);
// Drawing and renumbering.
void bind_sampling(nanobind::module_& m);

// Whether an object is a tensor whose negation is put off.
bool is_negated(nanobind::handle source) noexcept;
// A copy of a tensor whose memory holds what the tensor says; invalid for other objects.
nanobind::object plain_copy(nanobind::handle source) noexcept;

}  // namespace graphshard

template <typename... Args>
struct nanobind::detail::type_caster<graphshard::Array<Args...>> {
  using Plain = make_caster<ndarray<Args...>>;
  NB_TYPE_CASTER(graphshard::Array<Args...>, Plain::Name)

  template <typename Flags>
  bool from_python(handle source, Flags flags, cleanup_list* cleanup) noexcept {
    Plain plain;
    if (!plain.from_python(source, flags, cleanup)) return false;
    const uintptr_t address = reinterpret_cast<uintptr_t>(plain.value.data());
    const bool is_aligned =
        address % (plain.value.itemsize() == 0 ? 1 : plain.value.itemsize()) == 0;
    if (!is_aligned || graphshard::is_negated(source)) {
      if (!graphshard::Array<Args...>::ReadOnly) return false;
      const object copy = graphshard::plain_copy(source);
      if (!copy.is_valid() || !plain.from_python(copy, flags, cleanup)) return false;
    }
    value = graphshard::Array<Args...>(plain.value);
    return true;
  }
};
