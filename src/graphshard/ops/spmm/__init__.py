# SPDX-License-Identifier: Apache-2.0
"""Sparse times dense and its relatives: gspmm, gsddmm, edge_softmax and their gradients."""

from ._add_rows import add_rows
from ._argmax import merge_best
from ._compute import flat_rows
from ._edge_softmax import edge_softmax
from ._gsddmm import gsddmm
from ._gspmm import gspmm, gspmm_add, gspmm_arg, gspmm_arg_backward
