# SPDX-License-Identifier: Apache-2.0
"""Sparse operators on the edges of one relation, and what samples are made with.

`gspmm` sends messages along edges and reduces them at destinations, `gsddmm` computes a value per
edge, `edge_softmax` normalizes edge values, `attend` does all three for attention. `draw_neighbors`
draws edges at random, `IdTable` gives the nodes they reach consecutive ids, `copy_rows` collects
their features, and `group_by_range` and `ungroup` sort what is asked of several owners.
`group_equal`, `sum_groups` and `update_rows` are the step of an embedding's optimizer.
`segment_reduce`, `segment_mm` and their kin work on groups of rows. All run in
compiled kernels where those are installed and in plain torch where not; `reference` has the
operators on edges in their simplest form.
"""

from .._base.kernels import empty, empty_like, extension_available, release_memory
from . import reference
from ._adjacency import Adjacency, HasAdjacency, as_adjacency
from ._affine import affine, is_hooked, is_plain, is_relu, linear
from ._attention_rule import Attention, EdgeMask, edge_keys, random_seed
from ._named import NAMED
from ._row_groups import UpdateRule, group_equal, sum_groups, update_rows
from ._segments import gather_mm, segment_mm, segment_reduce, segment_softmax
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

copy_e = NAMED["copy_e"]
copy_e_max = NAMED["copy_e_max"]
copy_e_mean = NAMED["copy_e_mean"]
copy_e_min = NAMED["copy_e_min"]
copy_e_sum = NAMED["copy_e_sum"]
copy_u = NAMED["copy_u"]
copy_u_max = NAMED["copy_u_max"]
copy_u_mean = NAMED["copy_u_mean"]
copy_u_min = NAMED["copy_u_min"]
copy_u_sum = NAMED["copy_u_sum"]
copy_v = NAMED["copy_v"]
e_add_u = NAMED["e_add_u"]
e_add_v = NAMED["e_add_v"]
e_div_u = NAMED["e_div_u"]
e_div_v = NAMED["e_div_v"]
e_dot_u = NAMED["e_dot_u"]
e_dot_v = NAMED["e_dot_v"]
e_mul_u = NAMED["e_mul_u"]
e_mul_v = NAMED["e_mul_v"]
e_sub_u = NAMED["e_sub_u"]
e_sub_v = NAMED["e_sub_v"]
u_add_e = NAMED["u_add_e"]
u_add_e_max = NAMED["u_add_e_max"]
u_add_e_mean = NAMED["u_add_e_mean"]
u_add_e_min = NAMED["u_add_e_min"]
u_add_e_sum = NAMED["u_add_e_sum"]
u_add_v = NAMED["u_add_v"]
u_div_e = NAMED["u_div_e"]
u_div_e_max = NAMED["u_div_e_max"]
u_div_e_mean = NAMED["u_div_e_mean"]
u_div_e_min = NAMED["u_div_e_min"]
u_div_e_sum = NAMED["u_div_e_sum"]
u_div_v = NAMED["u_div_v"]
u_dot_e = NAMED["u_dot_e"]
u_dot_v = NAMED["u_dot_v"]
u_mul_e = NAMED["u_mul_e"]
u_mul_e_max = NAMED["u_mul_e_max"]
u_mul_e_mean = NAMED["u_mul_e_mean"]
u_mul_e_min = NAMED["u_mul_e_min"]
u_mul_e_sum = NAMED["u_mul_e_sum"]
u_mul_v = NAMED["u_mul_v"]
u_sub_e = NAMED["u_sub_e"]
u_sub_e_max = NAMED["u_sub_e_max"]
u_sub_e_mean = NAMED["u_sub_e_mean"]
u_sub_e_min = NAMED["u_sub_e_min"]
u_sub_e_sum = NAMED["u_sub_e_sum"]
u_sub_v = NAMED["u_sub_v"]
v_add_e = NAMED["v_add_e"]
v_add_u = NAMED["v_add_u"]
v_div_e = NAMED["v_div_e"]
v_div_u = NAMED["v_div_u"]
v_dot_e = NAMED["v_dot_e"]
v_dot_u = NAMED["v_dot_u"]
v_mul_e = NAMED["v_mul_e"]
v_mul_u = NAMED["v_mul_u"]
v_sub_e = NAMED["v_sub_e"]
v_sub_u = NAMED["v_sub_u"]

__all__ = [
    "Adjacency",
    "Attention",
    "EdgeMask",
    "HasAdjacency",
    "IdTable",
    "UpdateRule",
    "add_rows",
    "affine",
    "as_adjacency",
    "attend",
    "copy_e",
    "copy_e_max",
    "copy_e_mean",
    "copy_e_min",
    "copy_e_sum",
    "copy_rows",
    "copy_u",
    "copy_u_max",
    "copy_u_mean",
    "copy_u_min",
    "copy_u_sum",
    "copy_v",
    "draw_neighbors",
    "e_add_u",
    "e_add_v",
    "e_div_u",
    "e_div_v",
    "e_dot_u",
    "e_dot_v",
    "e_mul_u",
    "e_mul_v",
    "e_sub_u",
    "e_sub_v",
    "edge_keys",
    "edge_softmax",
    "empty",
    "empty_like",
    "extension_available",
    "gather_mm",
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
    "random_seed",
    "reference",
    "release_memory",
    "segment_mm",
    "segment_reduce",
    "segment_softmax",
    "sum_groups",
    "u_add_e",
    "u_add_e_max",
    "u_add_e_mean",
    "u_add_e_min",
    "u_add_e_sum",
    "u_add_v",
    "u_div_e",
    "u_div_e_max",
    "u_div_e_mean",
    "u_div_e_min",
    "u_div_e_sum",
    "u_div_v",
    "u_dot_e",
    "u_dot_v",
    "u_mul_e",
    "u_mul_e_max",
    "u_mul_e_mean",
    "u_mul_e_min",
    "u_mul_e_sum",
    "u_mul_v",
    "u_sub_e",
    "u_sub_e_max",
    "u_sub_e_mean",
    "u_sub_e_min",
    "u_sub_e_sum",
    "u_sub_v",
    "ungroup",
    "update_rows",
    "v_add_e",
    "v_add_u",
    "v_div_e",
    "v_div_u",
    "v_dot_e",
    "v_dot_u",
    "v_mul_e",
    "v_mul_u",
    "v_sub_e",
    "v_sub_u",
]
