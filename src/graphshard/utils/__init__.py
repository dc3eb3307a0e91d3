# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.utils`` that layers and examples use."""

from ._utils import check_eq_shape, expand_as_pair, is_sorted_srcdst

__all__ = ["check_eq_shape", "expand_as_pair", "is_sorted_srcdst"]
