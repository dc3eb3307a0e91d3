// SPDX-License-Identifier: Apache-2.0
// What the files of bindings share.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <stdexcept>

#include "types.h"

template <>
struct nanobind::detail::dtype_traits<graphshard::bfloat16> {
  static constexpr dlpack::dtype value{static_cast<uint8_t>(dlpack::dtype_code::Bfloat), 16, 1};
  static constexpr auto name = const_name("bfloat16");
};

namespace graphshard {

template <typename T>
using Matrix = nanobind::ndarray<T, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T>
using Vector = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T>
using MaybeMatrix = std::optional<Matrix<const T>>;
template <typename T>
using MaybeVector = std::optional<Vector<const T>>;

inline void require(bool condition, const char* rule) {
  if (!condition) throw std::invalid_argument(rule);
}

// Blocks for large results.
void bind_memory(nanobind::module_& m);
// Attention over in-edges.
void bind_attention(nanobind::module_& m);
// Drawing and renumbering.
void bind_sampling(nanobind::module_& m);

}  // namespace graphshard
