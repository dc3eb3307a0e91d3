# SPDX-License-Identifier: Apache-2.0
"""SamplingSource: what the loaders of PyG's shape draw from, wherever the graph is.

A source joins a `graphshard.sampling.GraphStore`, which says what neighbours nodes drew, with a
`graphshard.sampling.FeatureStore`, which has their rows, and knows what PyG calls both. Stores
count nodes and edges as they lie in parts; users count them as before partitioning.
`SamplingSource.stored` and `SamplingSource.original` go from one to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...comm import share_error
from ...comm.group import GroupState, alone, group_state
from ...sampling import FeatureRequest, FeatureStore, GraphStore

Kind: TypeAlias = str | CanonicalEType
"""A node type, or a relation."""

ORIGINAL = "orig_id"
"""What stores call the column of ids before partitioning."""

_CHUNK = 1 << 20


@dataclass(frozen=True, eq=False)
class SamplingSource:
    """A graph to sample from.

    Args:
        graph: Where neighbours come from.
        features: Where rows come from, by the same ids; `ORIGINAL` is among the columns of all
            kinds unless ``is_whole``.
        names: Node type or relation to what PyG calls a column, to what ``features`` calls it.
        is_typed: Whether batches are ``HeteroData``.
        is_whole: Whether the graph is whole in this process, and ids are the original ones.
        state: The ranks that iterate together.
        most_steps: From this process's number of batches to the most that any rank needs.
        is_fork_safe: Whether a forked process can sample.
    """

    graph: GraphStore
    features: FeatureStore
    names: Mapping[Kind, Mapping[str, str]]
    is_typed: bool
    is_whole: bool = False
    state: GroupState = field(default_factory=alone)
    most_steps: Callable[[int], int] = int
    is_fork_safe: bool = False
    _stored: dict[Kind, Tensor] = field(default_factory=dict)
    _earliest: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def ntypes(self) -> list[str]:
        return list(self.graph.ntypes)

    @property
    def etypes(self) -> list[CanonicalEType]:
        """Relations by name: stores have them in different orders, and samples shall be alike."""
        return sorted(self.graph.canonical_etypes)

    @property
    def is_collective(self) -> bool:
        """Whether every rank must take part whenever one samples."""
        return self.state.world_size > 1

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.state.group

    def share(self, error: Exception | None) -> None:
        """Raise on all ranks, or trainers, what went wrong on any; of a whole graph, here."""
        if not self.is_whole:
            share_error(error, self.group)
        elif error is not None:
            raise error

    def on(self, group: dist.ProcessGroup | None) -> SamplingSource:
        """The source for one thread, over another group of the same ranks."""
        graph, features = self.graph.on(group), self.features.on(group)
        return replace(self, graph=graph, features=features, state=group_state(group))

    def count(self, kind: Kind) -> int:
        """Nodes of a type, or edges of a relation, of the whole graph."""
        return self.graph.num_nodes(kind) if isinstance(kind, str) else self.graph.num_edges(kind)

    def kind(self, given: Any) -> Kind:
        """The node type or relation that PyG names; None is the only one of a plain graph."""
        if given is None or not self.is_typed:
            return self.ntypes[0]
        return tuple(given) if isinstance(given, list | tuple) else given

    # ------------------------------------------------------------------ ids

    def original(self, ids: Mapping[Kind, Tensor]) -> dict[Kind, Tensor]:
        """Ids before partitioning; collective where the source is, of the same kinds."""
        if self.is_whole:
            return dict(ids)
        requests = [FeatureRequest(kind, (ORIGINAL,), rows) for kind, rows in ids.items()]
        rows = self.features.fetch(requests)
        return {kind: row[ORIGINAL].cpu() for kind, row in zip(ids, rows, strict=True)}

    def stored(self, kind: Kind, original: Tensor) -> Tensor:
        """Ids under which the graph is stored, int64.

        The first call for a kind reads all of its ids, and is collective where the source is.

        Raises:
            ValueError: An id that the graph does not have.
        """
        original = original.to("cpu", torch.int64)
        self.check(kind, original)
        if self.is_whole:
            return original
        return self.prepare(kind)[original].to(torch.int64)

    def check(self, kind: Kind, original: Tensor) -> None:
        """Raise unless the graph has some ids.

        Raises:
            ValueError: It has not.
        """
        count = self.count(kind)
        if original.numel():
            low, high = (int(bound) for bound in torch.aminmax(original))
            if low < 0 or high >= count:
                what = f"nodes of type {kind!r}" if isinstance(kind, str) else f"edges of {kind}"
                raise ValueError(
                    f"{what} must be in [0, {count}) (got {low if low < 0 else high}); ids are "
                    "those of the graph before it was partitioned"
                )

    def prepare(self, kind: Kind) -> Tensor:
        """Where each id before partitioning is stored: integers ``[count]``; kept.

        Takes 4 bytes for each id, 8 from 2^31 ids on. Collective at first where the source is.
        """
        if kind not in self._stored:
            count = self.count(kind)
            places = torch.empty(count, dtype=torch.int32 if count < 2**31 else torch.int64)
            for begin in range(0, count, _CHUNK):
                ids = torch.arange(begin, min(begin + _CHUNK, count))
                places[self.original({kind: ids})[kind]] = ids.to(places.dtype)
            self._stored[kind] = places
        return self._stored[kind]

    # ------------------------------------------------------------------ rows

    def earliest(self, ntype: str, name: str) -> int:
        """The node with the smallest time, by its id before partitioning; kept.

        Reads all times; collective at first where the source is.
        """
        if (ntype, name) not in self._earliest:
            best, node, count = None, 0, self.count(ntype)
            for begin in range(0, count, _CHUNK):
                ids = torch.arange(begin, min(begin + _CHUNK, count))
                times, *rest = (
                    row[0].cpu().view(-1)
                    for row in self.fetch(
                        [(ntype, [name], ids)]
                        + ([] if self.is_whole else [(ntype, [ORIGINAL], ids)])
                    )
                )
                originals = rest[0] if rest else ids
                least = times.min()
                if best is None or least <= best:
                    of_least = int(originals[times == least].min())
                    node = of_least if best is None or least < best else min(node, of_least)
                    best = least
            self._earliest[ntype, name] = node
        return self._earliest[ntype, name]

    def columns(self, kind: Kind) -> list[str]:
        """What PyG calls the features of a kind."""
        return list(self.names.get(kind, {}))

    def fetch(self, wanted: Sequence[tuple[Kind, Sequence[str], Tensor]]) -> list[list[Tensor]]:
        """Rows of features, by PyG's names and stored ids; one exchange for all of them.

        Args:
            wanted: Node type or relation, names and ids; collective sources must be asked for the
                same kinds and names on all ranks.
        """
        requests = [
            FeatureRequest(kind, tuple(self._stored_name(kind, name) for name in names), ids)
            for kind, names, ids in wanted
        ]
        rows = self.features.fetch(requests)
        return [
            [row[name] for name in request.names]
            for request, row in zip(requests, rows, strict=True)
        ]

    def _stored_name(self, kind: Kind, name: str) -> str:
        return name if name == ORIGINAL else self.names[kind][name]
