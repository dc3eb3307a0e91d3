// SPDX-License-Identifier: Apache-2.0
// What the files of bindings share.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <stdexcept>

namespace graphshard {

template <typename T>
using Vector = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T>
using MaybeVector = std::optional<Vector<const T>>;

inline void require(bool condition, const char* rule) {
  if (!condition) throw std::invalid_argument(rule);
}

// Drawing and renumbering.
void bind_sampling(nanobind::module_& m);

}  // namespace graphshard
