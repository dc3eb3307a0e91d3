# SPDX-License-Identifier: Apache-2.0
"""Runner: runs what calls of the protocol were compiled to, as passes over shards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .._base.typing import CanonicalEType
from ..graph.frame import Frame
from .aggregation_mode import AggregationMode
from .fewest_rows import FewestRows, find_fewest_rows
from .halo_rows import HaloRowCache
from .lazy import DeferredEdges
from .reductions import (
    CompanionRows,
    EdgeRows,
    EdgeValues,
    Expression,
    LazySoftmax,
    PerEdge,
    Reduction,
    substitute,
    walk,
)
from .row_transport import (
    CollectiveTransport,
    PairwiseTransport,
    RowTransport,
    StatesTransport,
    split_of_attention,
)
from .shard_pass import ShardPass
from .softmax import SoftmaxSum, holds_softmax
from .topology import Shard, ShardStructure


@dataclass
class Compiled:
    """A call of the protocol as a pass runs it.

    Args:
        source: The field whose rows travel; None where others do not travel with it.
        constant: Under what the result is kept, and the constant tensors that it is of.
        finish: From the outputs of the reduction to the result; None for the only output.
        out_field: Where the result goes; "" where the caller knows.
    """

    etype: CanonicalEType
    reduction: Reduction
    source: str | None = None
    constant: tuple[Hashable, list[Tensor]] | None = None
    finish: Callable[[tuple[Tensor, ...]], Tensor] | None = None
    out_field: str = ""


class Runner:
    """Runs reductions on one rank's shards."""

    def __init__(self, structure: ShardStructure, config: AggregationMode) -> None:
        self.structure, self.config = structure, config
        self.rows = HaloRowCache(structure, config.halo_dtype)
        self.is_oneshot = config.mode == "oneshot"
        self._transports: dict[tuple[frozenset[CanonicalEType], bool, bool], RowTransport] = {}

    def run(
        self,
        group: Sequence[Compiled],
        companions: Sequence[Tensor] | None = None,
        frames: Sequence[Frame] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> list[tuple[Tensor, ...]]:
        """Outputs of one pass.

        Args:
            group: What to compute, for relations with one source type.
            companions: Tensors of the source type whose rows travel, too; None where remote rows
                are not kept for later calls.
            meanwhile: As for `ShardPass.run`, in one-shot mode.
        """
        reductions = [(call.etype, call.reduction) for call in group]
        etypes = [etype for etype, _ in reductions]
        transport = None if companions else self._summing_transport(etypes, group)
        if transport is None and len(group) == 1 and not companions:
            transport = self._states_transport(group[0])
        if transport is None:
            transport = self.transport(etypes)
        constants = self.structure.constants
        sources = [r for _, reduction in reductions for r in reduction.leaves if r.target == "u"]
        transport = transport.keyed(all(constants.is_constant([s.tensor]) for s in sources))
        depth, device = self.config.fetched_ahead, self.structure.device
        if not transport.returns_rows:
            shard_pass = ShardPass(transport, reductions, depth, device)
            return shard_pass.run(meanwhile if self.is_oneshot else None)
        if companions:
            reductions.append((group[0].etype, CompanionRows(companions)))
        halo = transport.halo
        own = {leaf.key: leaf.tensor for _, r in reductions for leaf in r.leaves}
        own = {key: tensor for key, tensor in own.items() if key[0] == "u"}
        fixed = {key: tensor for key, tensor in own.items() if not tensor.requires_grad}
        constant = {key: self.rows.constant_rows(halo, tensor) for key, tensor in fixed.items()}
        fetched_before = {key: rows for key, rows in constant.items() if rows is not None}
        # Where all results of some rows are kept, no call asks for the rows again.
        read_again = {("u", id(tensor)) for tensor in companions or ()}
        for call in group:
            if call.constant is None:
                read_again |= {leaf.key for leaf in call.reduction.leaves}
        shard_pass = ShardPass(transport, reductions, depth, device, fetched_before)
        outputs = shard_pass.run(meanwhile)[: len(group)]
        remote = shard_pass.take_remote()
        for key in fixed.keys() & read_again - fetched_before.keys():
            self.rows.keep_constant(halo, own[key], remote[key])
        if companions is not None:
            self.rows.put(halo, [(tensor, remote[key]) for key, tensor in own.items()], frames)
        return outputs

    def transport(
        self, etypes: Sequence[CanonicalEType], fewest: FewestRows | None = None
    ) -> RowTransport:
        """How rows of the halo of some relations travel; the only difference between the modes."""
        rematerializes = self.config.rematerializes
        key = frozenset(etypes), rematerializes, fewest is not None
        if key not in self._transports:
            halo, wire = self.structure.halo(etypes), self.config.halo_dtype
            self._transports[key] = (
                CollectiveTransport(halo, wire, fewest)
                if self.is_oneshot
                else PairwiseTransport(halo, wire, not rematerializes, fewest)
            )
        return self._transports[key]

    def _summing_transport(
        self, etypes: Sequence[CanonicalEType], group: Sequence[Compiled]
    ) -> RowTransport | None:
        """The transport of a pass of which partial sums travel; None where rows do.

        See [Note: fewest rows]. Collective the first time for some relations.
        """
        if not self.config.partial_sums or self.structure.world_size == 1:
            return None
        sources = [call.reduction.summed_source() for call in group]
        source = sources[0]
        if source is None or any(s is None or s.key != source.key for s in sources):
            return None
        if len(set(etypes)) < len(etypes) or self.structure.constants.is_constant([source.tensor]):
            return None
        halo = self.structure.halo(etypes)
        site = tuple([call.reduction.site for call in group])
        if self.rows.is_read_again(halo, source.tensor, site):
            return None
        fewest = halo.made_once(find_fewest_rows)
        if fewest is None:
            return None
        weights = group[0].reduction.summed_weights()
        transport: RowTransport | None = self.transport(etypes, fewest)
        if weights is not None:
            constants = self.structure.constants
            transport = self.transport(etypes, fewest).weighted(source.tensor, weights, constants)
        if transport is not None and self.is_oneshot:
            self.rows.note_summed(halo, source.tensor, site)
        return transport

    def _states_transport(self, call: Compiled) -> RowTransport | None:
        """Likewise of states of destinations, in one-shot mode."""
        if not self.config.partial_sums or not self.is_oneshot:
            return None
        halo, wire = self.structure.halo([call.etype]), self.config.halo_dtype
        split = split_of_attention(halo, call.reduction, wire, self.structure.constants)
        return None if split is None else StatesTransport(split, wire)

    def own_shard(self, etype: CanonicalEType) -> Shard:
        """The edges of a relation between rows of this rank."""
        return self.structure.halo([etype]).own_shard(etype)

    def is_here(self, call: Compiled, source: Frame) -> bool:
        """Whether nothing has to be fetched for a call in one-shot mode."""
        if self.structure.world_size == 1:
            return True
        if call.source is None:
            return False
        return self.rows.find(self.transport([call.etype]).halo, source[call.source]) is not None

    def companions(self, call: Compiled, source: Frame) -> list[Tensor] | None:
        """Source fields that travel with that of a call; None where no remote rows are kept."""
        if not self.is_oneshot or call.source is None or not self.rows.num_scopes:
            return None
        return self.rows.companions(self.transport([call.etype]).halo, source, call.source)

    # ------------------------------------------------------------------ values of edges

    def deferred(self, etype: CanonicalEType, num_edges: int, value: Expression) -> DeferredEdges:
        """A value of each edge that is computed where it is needed."""

        # Not the frames: the value will be in one of them, and a cycle would keep all of their
        # tensors until the garbage collector comes by.
        def materialize(expression: Expression) -> Tensor:
            if isinstance(expression, EdgeRows):
                return expression.leaf.tensor
            message = PerEdge(self.resolve(etype, expression))
            ((rows,),) = self.run([Compiled(etype, EdgeValues([message], num_edges))])
            return rows

        return DeferredEdges(value, materialize, self.structure.device)

    def resolve(self, etype: CanonicalEType, root: Expression) -> Expression:
        """``root`` with each softmax turned into arithmetic, by a pass that finds its total."""
        while True:
            softmaxes = (node for node in walk(root) if isinstance(node, LazySoftmax))
            inner = next((node for node in softmaxes if not holds_softmax(node.child)), None)
            if inner is None:
                return root
            peak, total = self.statistics(etype, inner)
            plain = inner.resolve(peak, total.masked_fill(total == 0, 1.0))
            root = substitute(root, {id(inner): plain})

    def statistics(self, etype: CanonicalEType, softmax: LazySoftmax) -> tuple[Tensor, Tensor]:
        """Peak and total of a softmax at each destination."""
        reduction = SoftmaxSum(softmax)
        ((total,),) = self.run([Compiled(etype, reduction)])
        assert reduction.shifted.peak is not None
        return reduction.shifted.peak, total
