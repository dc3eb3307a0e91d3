# SPDX-License-Identifier: Apache-2.0
"""CollectiveStructure: every rank draws for the nodes that it owns, whoever asks.

::

    announce   sizes of what follows                     4 (2 + 2 R) bytes to each other rank
    ask        rows, and edges that must not be drawn    w bytes each
    count      edges drawn for each row                  1, 2, 4 or 8 bytes each
    answer     neighbours, and edge ids if asked for     w bytes each

One round for a whole layer, whatever the number of relations R; w is 4 unless some type or relation
has 2^31 ids or more. Rows that a rank owns itself do not leave it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..._typing import CanonicalEType
from ...comm.group import group_state
from ...fullbatch import GraphShardManager
from .._announce import announce
from .._ownership import Ownership
from ..feature_store import same_ranks
from ._hop import Hop
from ._own_edges import OwnEdges
from ._sharded_structure import ShardedStructure
from ._structure import Drawn, DrawOptions, HopRequest


class CollectiveStructure(ShardedStructure):
    """A graph whose nodes draw where they are owned; made by `of`.

    `draw` sends, from a rank to all others together, with P ranks and R relations,
    ``4 (2 + 2 R) (P - 1) + w (rows asked of others + edge ids excluded elsewhere) +
    c (rows that others asked of it) + w (1 or, with edge ids, 2) (edges drawn for others)`` bytes.
    Here w is 4 (8 if a type or relation has 2^31 ids or more), and c the bytes of the smallest
    integer (1, 2, 4) that holds as many edges as can be drawn for a row.
    """

    @classmethod
    def of(
        cls, manager: GraphShardManager, group: dist.ProcessGroup | None = None
    ) -> CollectiveStructure:
        """The structure of a sharded graph; every rank must call.

        Args:
            manager: This rank's part of a full graph.
            group: Who takes part; by default the ranks that share the graph.

        Raises:
            ValueError: The graph is a message flow graph.
        """
        group = manager.group if group is None else group
        ownership = Ownership.of(manager, group)
        return cls(OwnEdges(manager, ownership, group_state(group)), manager.idtype)

    def on(self, group: dist.ProcessGroup | None) -> CollectiveStructure:
        """The same structure, answering over another group of the same ranks.

        Raises:
            ValueError: The group has other ranks.
        """
        return CollectiveStructure(self._edges.on(same_ranks(self._state, group)), self.idtype)

    def draw(
        self,
        requests: Sequence[HopRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[Drawn]:
        """Draw for each request; every rank must call. See `Structure.draw`.

        Edges are excluded for the rank that says so, not for the others.

        Raises:
            ValueError: On all ranks: weights that are missing or no weights on some rank, or
                ranks that draw differently.
        """
        if not requests:
            return []
        error = None
        lacking = 0
        etypes = [request.etype for request in requests]
        try:
            self._edges.check_weights(etypes, options)
            lacking = self._edges.lacking(etypes, options)
        except ValueError as caught:
            error = caught
        hop = Hop(self._edges, requests, options, excluded or {}, self.idtype)
        asked, lacking = announce(
            self._state,
            "what neighbours are drawn",
            self._signature(requests, options, error),
            error,
            hop.sizes(),
            lacking,
        )
        self._edges.prepare(etypes, options, lacking)
        return hop.run(asked)

    def prepare(self, options: DrawOptions) -> None:
        """Make now what draws of a kind need first, so that copies have it; every rank must call.

        Raises:
            ValueError: As `draw`.
        """
        none = torch.empty(0, dtype=self.idtype)
        self.draw([HopRequest(etype, none, 0, 0) for etype in self.canonical_etypes], options)

    def _signature(
        self, requests: Sequence[HopRequest], options: DrawOptions, error: Exception | None
    ) -> str:
        """What ranks must agree about."""
        drawn = [
            f"{r.etype} fanout {r.fanout} key {r.key:#x} weights "
            f"{None if error else self._edges.weight_dtype(r.etype, options)}"
            for r in requests
        ]
        return f"{options}: {'; '.join(drawn)}"
