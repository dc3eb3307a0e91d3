// SPDX-License-Identifier: Apache-2.0
// Arrays from Python: what they must be, and their memory as kernels take it.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <stdexcept>
#include <type_traits>

#include "runtime/csr.h"
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

// Contiguous arrays of any dtype, to read or to write. Which dtype it is, is looked at once for all
// arguments of a call: a binding for each would be six of each function.
using InVector = Array<nanobind::ro, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using InMatrix = Array<nanobind::ro, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using OutVector = Array<nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using OutMatrix = Array<nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
// Rows that may lie apart.
using InRows = Array<nanobind::ro, nanobind::ndim<2>, nanobind::device::cpu>;
using OutRows = Array<nanobind::ndim<2>, nanobind::device::cpu>;

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

// The entries of an array, which must be of type T; null where there is no array.
template <typename T, typename A>
auto data_of(const A& array) {
  using Entry = std::conditional_t<A::ReadOnly, const T, T>;
  if (array.dtype() != nanobind::dtype<T>()) {
    throw nanobind::type_error("an array must have the dtype that goes with those of the others");
  }
  return static_cast<Entry*>(array.data());
}
template <typename T, typename A>
auto data_of(const std::optional<A>& array) {
  return array ? data_of<T>(*array) : nullptr;
}

template <typename A>
int64_t rows_in(const A& array) {
  return static_cast<int64_t>(array.shape(0));
}
template <typename A>
int64_t columns_in(const A& array) {
  return static_cast<int64_t>(array.shape(1));
}

// Calls function(T{}) for the type of values, or of ids, with this dtype.
template <typename Function>
auto with_value_type(const nanobind::dlpack::dtype& dtype, const Function& function) {
  if (dtype == nanobind::dtype<float>()) return function(float{});
  if (dtype == nanobind::dtype<double>()) return function(double{});
  if (dtype == nanobind::dtype<bfloat16>()) return function(bfloat16{});
  throw nanobind::type_error("values must be float32, float64 or bfloat16");
}
template <typename Function>
auto with_id_type(const nanobind::dlpack::dtype& dtype, const Function& function) {
  if (dtype == nanobind::dtype<int32_t>()) return function(int32_t{});
  if (dtype == nanobind::dtype<int64_t>()) return function(int64_t{});
  throw nanobind::type_error("ids must be int32 or int64");
}

template <typename A>
Ids ids_of(const A& array) {
  return with_id_type(array.dtype(),
                      [&](auto zero) { return Ids(data_of<decltype(zero)>(array)); });
}
template <typename A>
Ids ids_of(const std::optional<A>& array) {
  return array ? ids_of(*array) : Ids();
}
template <typename A>
WritableIds writable_ids_of(const A& array) {
  return with_id_type(array.dtype(),
                      [&](auto zero) { return WritableIds(data_of<decltype(zero)>(array)); });
}

// Edges grouped by one end, with as many rows as indptr has. What walks take for granted of indptr
// is checked; what ids are behind it, where a structure is made, by ops/_adjacency.py. `indices`
// may be null ids where nothing reads them.
Csr csr_of(const InVector& indptr, const Ids& indices, const std::optional<InVector>& eids,
           size_t num_edges);

// Sums and other reductions over in-edges, and values per edge.
void bind_spmm(nanobind::module_& m);
// Blocks for large results.
void bind_memory(nanobind::module_& m);
// Attention over in-edges.
void bind_attention(nanobind::module_& m);
// Products of rows and matrices.
void bind_dense(nanobind::module_& m);
// Gradients and updates of embeddings.
void bind_embedding(nanobind::module_& m);
// Partitioning of graphs that do not fit in memory.
void bind_partition(nanobind::module_& m);
// Drawing and renumbering.
void bind_sampling(nanobind::module_& m);
// Keys of users' tables.
void bind_tables(nanobind::module_& m);

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
