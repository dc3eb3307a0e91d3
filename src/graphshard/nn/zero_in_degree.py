# SPDX-License-Identifier: Apache-2.0
"""ZeroInDegreeCheck: the base of layers that refuse nodes to which nothing is sent."""

from __future__ import annotations

from torch import nn

from ..errors import GraphValueError
from ..graph import MessagePassingGraph


class ZeroInDegreeCheck(nn.Module):
    """A layer whose output is meaningless for a node without in-edges.

    Args:
        allow_zero_in_degree: Accept such nodes; their neighbourhood counts as zero.
    """

    def __init__(self, allow_zero_in_degree: bool) -> None:
        super().__init__()
        self._allow_zero_in_degree = allow_zero_in_degree

    def set_allow_zero_in_degree(self, set_value: bool) -> None:
        """Accept (``True``) or refuse (``False``) nodes without in-edges from now on."""
        self._allow_zero_in_degree = set_value

    def _check_in_degrees(self, graph: MessagePassingGraph) -> None:
        """Raise ValueError, on every rank alike, if a node without in-edges is refused."""
        if not self._allow_zero_in_degree and graph.any_zero_in_degree():
            raise GraphValueError(
                f"{type(self).__name__} needs at least one in-edge per node, and this graph has "
                "nodes with none (0-in-degree): their output would be made of nothing. Add self "
                "loops with add_self_loop(graph), or pass allow_zero_in_degree=True"
            )
