# SPDX-License-Identifier: Apache-2.0
"""ShardStructure: everything about a sharded graph that does not change, shared by its views."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...comm import ExchangePlan, all_reduce, fetch_halo, return_halo
from ...comm.collectives import verify
from ...comm.group import group_state
from ...ops import Adjacency, Attention, edge_keys
from ._constants import ConstantCache
from ._shards import Halo, LocalEdges, needed_rows


class ShardStructure:
    """Rows and edges of one rank, and the halos that its relations read.

    Creating one is collective: the ranks add up, once, how many edges each relation has and
    whether some node has none.

    Args:
        edges: Relation to this rank's in-edges under it, in schema order.
        num_src: Source node type to rows of this rank's source frame.
        num_dst: Destination node type to rows of this rank's destination frame.
        device: Where rows and edges live.
        group: Process group; None for the default.
        constants: Of a structure with the same rows: what is constant there is constant here.
    """

    def __init__(
        self,
        edges: Mapping[CanonicalEType, LocalEdges],
        num_src: Mapping[str, int],
        num_dst: Mapping[str, int],
        device: torch.device,
        group: dist.ProcessGroup | None,
        constants: ConstantCache | None = None,
    ) -> None:
        self.edges = dict(edges)
        self.num_src, self.num_dst = dict(num_src), dict(num_dst)
        self.device = device
        self._group = None if group is None else weakref.ref(group)
        self.constants = ConstantCache(constants)
        #: Structures with other self loops: what was done to which relation.
        self.changed: dict[tuple[str, CanonicalEType], ShardStructure] = {}
        self._halos: dict[frozenset[CanonicalEType], Halo] = {}
        self._degrees: dict[tuple[str, CanonicalEType], Tensor] = {}
        counts = torch.tensor(
            [[e.num_edges, int((self.in_degrees(t) == 0).any())] for t, e in self.edges.items()],
            dtype=torch.int64,
        ).view(-1, 2)
        totals = all_reduce(counts, group=group)
        self._global_edges = dict(zip(self.edges, totals[:, 0].tolist(), strict=True))
        self._zero_in_degree = dict(zip(self.edges, (totals[:, 1] > 0).tolist(), strict=True))
        if len(self.edges) == 1:  # which relations of several are read together is known in use
            self.halo(self.edges)

    @property
    def canonical_etypes(self) -> list[CanonicalEType]:
        return list(self.edges)

    def global_num_edges(self, etype: CanonicalEType) -> int:
        """Edges of a relation on all ranks."""
        return self._global_edges[etype]

    def any_zero_in_degree(self, etype: CanonicalEType) -> bool:
        """Whether some destination, on any rank, has no in-edge."""
        return self._zero_in_degree[etype]

    def in_degrees(self, etype: CanonicalEType) -> Tensor:
        """``[num_dst]`` int64; all in-edges of a row are on its own rank."""
        edges = self.edges[etype]
        count = partial(torch.bincount, edges.dst, minlength=edges.num_dst)
        return self._once("in", etype, count)

    def mean_counts(self, etype: CanonicalEType) -> Tensor:
        """What a sum is divided by for the mean: in-degrees, at least 1."""
        return self._once("mean", etype, lambda: self.in_degrees(etype).clamp(min=1))

    def out_degrees(self, etype: CanonicalEType) -> Tensor:
        """``[num_src]`` int64, counted on all ranks; collective on first use."""

        def count() -> Tensor:
            halo = self.halo([etype])
            counts = torch.bincount(halo.extended_src(etype), minlength=halo.num_extended)
            own, remote = counts[: halo.num_owned], counts[halo.num_owned :]
            return own + return_halo([(halo.plan, remote)], "sum")[0]

        return self._once("out", etype, count)

    def extended_out_degrees(self, etype: CanonicalEType) -> Tensor:
        """Likewise of the extended rows of the relation's source type."""

        def fetch() -> Tensor:
            own, halo = self.out_degrees(etype), self.union_halo(etype[0])
            assert halo is not None
            return torch.cat([own, fetch_halo([(halo.plan, own)])[0]])

        return self._once("extended", etype, fetch)

    def _once(self, what: str, etype: CanonicalEType, find: Callable[[], Tensor]) -> Tensor:
        key = what, etype
        if key not in self._degrees:
            self._degrees[key] = find()
        return self._degrees[key]

    def halo(self, etypes: Iterable[CanonicalEType]) -> Halo:
        """The remote rows that some relations read; all of one source type.

        Collective the first time it is asked for some set of relations.
        """
        key = frozenset(etypes)
        if key not in self._halos:
            chosen = {etype: self.edges[etype] for etype in self.edges if etype in key}
            (source_type,) = {source for source, _, _ in chosen}
            num_owned = self.num_src[source_type]
            plan = self._plan(list(chosen.values()), num_owned)
            longest = torch.tensor([max(plan.send_splits, default=0)])
            longest = all_reduce(longest, "max", group=self.group)
            self._halos[key] = Halo(num_owned, chosen, plan, int(longest))
        return self._halos[key]

    def _plan(self, edges: Sequence[LocalEdges], num_rows: int) -> ExchangePlan:
        needed = needed_rows(edges, self.rank, self.world_size)
        return ExchangePlan.build(needed, num_rows, group=self.group, device=self.device)

    def union_halo(self, source_type: str) -> Halo | None:
        """The remote rows that any relation reads of one source type."""
        etypes = [etype for etype in self.edges if etype[0] == source_type]
        return self.halo(etypes) if etypes else None

    def local_adjacency(self, etype: CanonicalEType) -> Adjacency:
        """From the extended rows of the relation's source type to own rows."""
        halo = self.union_halo(etype[0])
        assert halo is not None
        return halo.adjacency(etype)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share the graph; None for the default group. Not kept past its end."""
        return None if self._group is None else self._group()

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    @cached_property
    def world_size(self) -> int:
        return dist.get_world_size(self.group) if dist.is_initialized() else 1


def agree_on_build(
    build: str | None, error: Exception | None, group: dist.ProcessGroup | None
) -> None:
    """Check that all ranks have parts of one partition, in the round in which an error is shared.

    Args:
        build: Digest that names the partition of this rank's part; None if nothing says.
        error: What this rank has found wrong, if anything.
        group: The ranks.

    Raises:
        ValueError: On every rank, if parts of different builds came together; or the error.
    """
    verify(
        group_state(group),
        "no build" if build is None else build,
        "the partition that parts are from, as its build names it,",
        error,
        "copy one partition's folder to every host and load it everywhere",
    )


@dataclass(frozen=True)
class OriginalIds:
    """What this rank's nodes and edges were called before the graph was partitioned.

    Args:
        nodes: Node type to int64 ``[num_src_nodes]``, one per row of the source frame.
        edges: Relation to int64 ``[num_edges]``, one per row of the edge frame.
    """

    nodes: Mapping[str, Tensor]
    edges: Mapping[CanonicalEType, Tensor]
    _keys: dict[CanonicalEType, Tensor] = field(default_factory=dict, init=False, repr=False)

    def keyed(self, etype: CanonicalEType, attention: Attention) -> Attention:
        """The attention, its dropout mask going by original edge ids.

        So the mask of an edge does not depend on the partition, if all ranks have one seed.
        """
        if attention.mask is None or attention.mask.keys is not None:
            return attention
        if etype not in self._keys:
            self._keys[etype] = edge_keys(self.edges[etype])
        return replace(attention, mask=replace(attention.mask, keys=self._keys[etype]))
