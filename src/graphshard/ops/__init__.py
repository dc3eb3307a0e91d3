# SPDX-License-Identifier: Apache-2.0
"""Sparse operators on the edges of one relation, and what samples are made with.

`gspmm` sends messages along edges and reduces them at destinations, `gsddmm` computes a value per
edge, `edge_softmax` normalizes edge values, `attend` does all three for attention. `draw_neighbors`
draws edges at random, `IdTable` gives the nodes they reach consecutive ids, `copy_rows` collects
their features, and `group_by_range` and `ungroup` sort what is asked of several owners.
`group_equal`, `sum_groups` and `update_rows` are the step of an embedding's optimizer.
All run in compiled kernels where those are installed and in plain torch where not; `reference` has
the operators on edges in their simplest form.
"""

from .._base.kernels import empty, empty_like, extension_available, release_memory
from . import reference
from ._adjacency import Adjacency, HasAdjacency, as_adjacency
from ._affine import AffineInSteps as AffineInSteps
from ._affine import affine, is_hooked, is_plain, is_relu, linear
from ._attention_rule import Attention, EdgeMask, edge_keys, random_seed
from ._dense import multiply as multiply
from ._dense import multiply_transposed as multiply_transposed
from ._leading_rows import leading_rows as leading_rows
from ._product_rows import BlockwiseRows, ProductRows, place_of
from ._row_groups import UpdateRule, group_equal, sum_groups, update_rows
from .attention import attend, head_products
from .sampling import IdTable, copy_rows, draw_neighbors, group_by_range, ungroup
from .spmm import (
    add_rows,
    edge_softmax,
    gsddmm,
    gspmm,
    gspmm_add,
    gspmm_arg,
    gspmm_arg_backward,
    merge_best,
)

__all__ = [
    "Adjacency",
    "Attention",
    "BlockwiseRows",
    "EdgeMask",
    "HasAdjacency",
    "IdTable",
    "ProductRows",
    "UpdateRule",
    "add_rows",
    "affine",
    "as_adjacency",
    "attend",
    "copy_rows",
    "draw_neighbors",
    "edge_keys",
    "edge_softmax",
    "empty",
    "empty_like",
    "extension_available",
    "group_by_range",
    "group_equal",
    "gsddmm",
    "gspmm",
    "gspmm_add",
    "gspmm_arg",
    "gspmm_arg_backward",
    "head_products",
    "is_hooked",
    "is_plain",
    "is_relu",
    "linear",
    "merge_best",
    "place_of",
    "random_seed",
    "reference",
    "release_memory",
    "sum_groups",
    "ungroup",
    "update_rows",
]
