# SPDX-License-Identifier: Apache-2.0
"""The names of ``sar.patch_dgl``, and what undoes it."""

from ..dgl import patch_dgl as patch_dgl
from ..dgl import patched_edge_softmax as patched_edge_softmax
from ..dgl import unpatch_dgl as unpatch_dgl
from ..nn import RelGraphConv as RelGraphConv
