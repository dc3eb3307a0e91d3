# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.utils`` that layers and examples use."""

from ._utils import (
    Filter,
    apply_each,
    check_eq_shape,
    expand_as_pair,
    is_libxsmm_enabled,
    is_sorted_srcdst,
    recursive_apply,
    use_libxsmm,
)

__all__ = [
    "Filter",
    "apply_each",
    "check_eq_shape",
    "expand_as_pair",
    "is_libxsmm_enabled",
    "is_sorted_srcdst",
    "recursive_apply",
    "use_libxsmm",
]
