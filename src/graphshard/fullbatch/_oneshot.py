# SPDX-License-Identifier: Apache-2.0
"""One-shot aggregation: fetch the whole halo of a layer in one exchange, then work locally.

[Note: overlap]
    A sum or mean of built-in messages of source rows, and fused attention, run as a pass of two
    shards: the own one, computed while the exchange of all remote rows is under way, and one with
    all remote rows. Backward it is the other way round: gradients of remote rows are found first,
    and travel home while those of own rows are found. Everything else works on *extended rows*,
    which is a copy of the own rows with the remote ones after them.

[Note: fields travel together]
    A layer often reads several source fields one after the other: GAT reads ``el`` for the scores
    and ``ft`` for the sum. The first read sends along every source field that was set since the
    innermost ``local_scope`` began, so a layer costs one exchange forward and one backward.
    Fields set through ``dstdata`` stay at home, and so do fields from outside the scope until
    they are read. A pass sends what it reads alone, so it is taken only where no other field is
    waiting; its remote rows are kept like any others, for the next read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._typing import CanonicalEType
from ..comm import fetch_halo
from ..function import MessageFunction, ReduceFunction
from ..graph import Frame
from ..graph._relation import RelationData, edge_values, reduce_messages
from ..ops import Attention, attend, gspmm
from ._attention import TARGETS, AttentionSum
from ._constants import ConstantCache
from ._expressions import EdgeRows, LeafKey
from ._messages import CopySource, Weighted
from ._passes import Again, ShardPass
from ._policy import AggregationMode
from ._reductions import Reduction, Sum
from ._sequential import RelationFields, constant_key, mean_counts
from ._softmax_of_rows import softmax_over_in_edges, softmax_over_out_edges
from ._structure import ShardStructure
from ._topology import Halo
from ._transport import Whole


def remote_rows(
    constants: ConstantCache,
    requests: Sequence[tuple[Halo, Tensor]],
    wire: torch.dtype | None = None,
) -> list[Tensor]:
    """Halo rows of all requests in one exchange; collective.

    Args:
        constants: Keeps the halo rows of tensors that need no gradient.
        requests: A halo and own rows ``[num_owned, ...]`` each.
        wire: In which dtype wider rows travel; None is their own.

    Returns:
        ``[num_halo, ...]`` for each request.
    """
    remote = [_known_rows(constants, halo, own) for halo, own in requests]
    missing = [i for i, rows in enumerate(remote) if rows is None]
    fetched = fetch_halo([(requests[i][0].plan, requests[i][1]) for i in missing], wire)
    for i, rows in zip(missing, fetched, strict=True):
        remote[i] = rows
        _keep_rows(constants, *requests[i], rows)
    return [rows for rows in remote if rows is not None]


def _known_rows(constants: ConstantCache, halo: Halo, own: Tensor) -> Tensor | None:
    if not constants.is_constant([own]):
        return None
    return constants.get(("halo", id(halo)), [own])


def _keep_rows(constants: ConstantCache, halo: Halo, own: Tensor, rows: Tensor) -> None:
    if constants.is_constant([own]):
        constants.put(("halo", id(halo)), [own], rows)


def extended(halo: Halo, own: Tensor, remote: Tensor) -> Tensor:
    """Own rows and then halo rows, ``[num_extended, ...]``; with one rank the own tensor itself."""
    return own if halo.plan.world_size == 1 else torch.cat([own, remote])


@dataclass
class _Fetched:
    """A field whose halo rows are here, at the version that they are of."""

    tensor: Tensor
    version: int
    remote: Tensor
    extended: Tensor | None = None


class FetchedFields:
    """Extended rows of source fields, kept while the fields are those of the frames."""

    def __init__(self, structure: ShardStructure, wire: torch.dtype | None) -> None:
        self._structure, self._wire = structure, wire
        self._entries: dict[tuple[int, int], _Fetched] = {}

    def extended(self, halo: Halo, frame: Frame, name: str, frames: Sequence[Frame]) -> Tensor:
        """Rows of field ``name`` for own and halo rows: ``[num_extended, ...]``.

        Args:
            halo: The rows to fetch.
            frame: The source frame that has the field.
            name: The field.
            frames: All source frames in use; what is no longer in any of them is forgotten.
        """
        wanted = frame[name]
        found = self._find(halo, wanted)
        if found is not None:
            return self._extended(halo, found)
        self._forget_unused(frames)
        companions = self._companions(frame, name)
        tensors = [wanted, *(t for t in companions if self._find(halo, t) is None)]
        distinct = list({id(t): t for t in tensors}.values())
        fetched = remote_rows(self._structure.constants, [(halo, t) for t in distinct], self._wire)
        for tensor, rows in zip(distinct, fetched, strict=True):
            self._put(halo, tensor, rows)
        found = self._find(halo, wanted)
        assert found is not None
        return self._extended(halo, found)

    def travels_alone(self, halo: Halo, frame: Frame, name: str) -> bool:
        """Whether a read of field ``name`` would fetch its rows, and those of no other field."""
        tensors = [frame[name], *self._companions(frame, name)]
        missing = {id(t) for t in tensors if self._find(halo, t) is None}
        return missing == {id(frame[name])}

    def put(self, halo: Halo, tensor: Tensor, remote: Tensor, frames: Sequence[Frame]) -> None:
        """Keep halo rows that came otherwise."""
        self._forget_unused(frames)
        self._put(halo, tensor, remote)

    def _put(self, halo: Halo, tensor: Tensor, remote: Tensor) -> None:
        self._entries[id(halo), id(tensor)] = _Fetched(tensor, _version(tensor), remote)

    def _companions(self, frame: Frame, name: str) -> list[Tensor]:
        return [
            frame[other]
            for other in frame.scope_fields()
            if other != name and frame.view_of(other) != "dst"
        ]

    def _extended(self, halo: Halo, entry: _Fetched) -> Tensor:
        if entry.extended is None:
            entry.extended = extended(halo, entry.tensor, entry.remote)
        return entry.extended

    def _find(self, halo: Halo, tensor: Tensor) -> _Fetched | None:
        entry = self._entries.get((id(halo), id(tensor)))
        if entry is None or entry.tensor is not tensor or entry.version != _version(tensor):
            return None
        # Rows fetched without a gradient do not serve a pass that needs one.
        stale = tensor.requires_grad and torch.is_grad_enabled() and not entry.remote.requires_grad
        return None if stale else entry

    def _forget_unused(self, frames: Sequence[Frame]) -> None:
        in_use = {id(value) for frame in frames for value in frame.values()}
        self._entries = {k: e for k, e in self._entries.items() if id(e.tensor) in in_use}

    def clear(self) -> None:
        self._entries.clear()


class ExtendedFields(Mapping[str, Any]):
    """A source frame as one relation's edges see it: extended rows, fetched when read."""

    def __init__(
        self, fetched: FetchedFields, halo: Halo, frame: Frame, frames: Sequence[Frame]
    ) -> None:
        self._fetched, self._halo, self._frame, self._frames = fetched, halo, frame, frames

    def __getitem__(self, name: str) -> Tensor:
        return self._fetched.extended(self._halo, self._frame, name, self._frames)

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)


class OneShot:
    """Message passing over all in-edges at once; any reduction works.

    Args:
        structure: The rank's rows and edges.
        mode: Whether own rows are computed while others are under way, and in which dtype.
    """

    def __init__(self, structure: ShardStructure, mode: AggregationMode) -> None:
        self.structure, self.mode = structure, mode
        self.fetched = FetchedFields(structure, mode.halo_dtype)

    def fetch(self, requests: Sequence[tuple[Halo, Tensor]]) -> list[Tensor]:
        """Extended rows of some tensors, ``[num_extended, ...]`` each, in one exchange."""
        remote = remote_rows(self.structure.constants, requests, self.mode.halo_dtype)
        pairs = zip(requests, remote, strict=True)
        return [extended(halo, own, rows) for (halo, own), rows in pairs]

    def reduce(
        self, fields: RelationFields, frames: Sequence[Frame], message: Any, reduce: Any
    ) -> dict[str, Any]:
        """New destination fields, as `graph._relation.reduce_messages`.

        Args:
            fields: The relation.
            frames: All source frames in use.
            message: A `MessageFunction`, or one of the user's.
            reduce: A `ReduceFunction`, or one of the user's.
        """
        found = _sum_of_sources(fields, message, reduce)
        if found is None:
            return reduce_messages(self._data(fields, frames), message, reduce)
        name, summed = found
        key = constant_key(fields.etype, message, reduce, summed)
        result = None if key is None else self.structure.constants.get(*key)
        if result is None:
            result = self._overlapped_sum(fields, frames, name, summed, reduce.op)
            if result is None:
                result = reduce_messages(self._data(fields, frames), message, reduce)[
                    reduce.out_field
                ]
            if key is not None:
                self.structure.constants.put(*key, result)
        return {reduce.out_field: result}

    def edge_values(
        self, fields: RelationFields, frames: Sequence[Frame], func: Any
    ) -> dict[str, Any]:
        """New edge fields, as `graph._relation.edge_values`."""
        return edge_values(self._data(fields, frames), func)

    def attend(self, etype: CanonicalEType, attention: Attention) -> Tensor:
        """Fused attention; what it reads of sources comes in one exchange."""
        halo = self.structure.halo([etype])
        if self.structure.world_size == 1:
            return attend(halo.adjacency(etype), attention)
        operands = attention.operands

        def again(by_key: Mapping[LeafKey, Tensor]) -> Sequence[Tensor]:
            """By extended rows, for gradients of gradients."""
            targets = TARGETS
            places = [
                None if t is None else by_key[target, id(t)]
                for target, t in zip(targets, operands, strict=True)
            ]
            read = [i for i, t in enumerate(places) if t is not None and targets[i] == "u"]
            own = {id(places[i]): places[i] for i in read}
            rows = self.fetch([(halo, t) for t in own.values() if t is not None])
            by_id = dict(zip(own, rows, strict=True))
            for i in read:
                places[i] = by_id[id(places[i])]
            bias = None if attention.bias is None else by_key["c", id(attention.bias)]
            whole = attention.with_operands(places).finished(bias, attention.relu)
            return [attend(halo.adjacency(etype), whole)]

        result, _ = self._overlapped(halo, etype, AttentionSum(attention), again, True)
        return result

    def edge_softmax(
        self, etypes: Sequence[CanonicalEType], logits: Sequence[Tensor], norm_by: str
    ) -> list[Tensor]:
        """Weights of the edges of some relations that share an end type, normalised together."""
        if norm_by == "src":
            return softmax_over_out_edges(self.structure, etypes, logits)
        return softmax_over_in_edges(self.structure, etypes, logits)

    def _data(self, fields: RelationFields, frames: Sequence[Frame]) -> RelationData:
        halo = self.structure.halo([fields.etype])
        source = ExtendedFields(self.fetched, halo, fields.src, frames)
        adjacency = halo.adjacency(fields.etype)
        return RelationData(adjacency, fields.etype, source, fields.dst, fields.edge)

    def _overlapped_sum(
        self,
        fields: RelationFields,
        frames: Sequence[Frame],
        name: str,
        message: CopySource | Weighted,
        op: str,
    ) -> Tensor | None:
        """Sum or mean of messages of field ``name``, or None where extended rows are better."""
        etype, constants = fields.etype, self.structure.constants
        halo = self.structure.halo([etype])
        if self.structure.world_size == 1 or not self.fetched.travels_alone(halo, fields.src, name):
            return None
        counts = mean_counts(self.structure, etype) if op == "mean" else None
        # Not the message itself, whose rows the pass may let go before the backward.
        source_key, (_, *edge_keys) = message.source.key, [leaf.key for leaf in message.leaves()]
        how = message.op if isinstance(message, Weighted) else "copy_lhs"

        def again(by_key: Mapping[LeafKey, Tensor]) -> Sequence[Tensor]:
            """By extended rows, for gradients of gradients."""
            own = by_key[source_key]
            (remote,) = remote_rows(constants, [(halo, own)], self.mode.halo_dtype)
            edge = by_key[edge_keys[0]] if edge_keys else None
            rows = extended(halo, own, remote)
            return [gspmm(halo.adjacency(etype), how, op, rows, edge), remote]

        keeps_rows = not constants.is_constant([leaf.tensor for leaf in message.leaves()])
        reduction = Sum(message, counts)
        result, remote = self._overlapped(halo, etype, reduction, again, keeps_rows)
        self.fetched.put(halo, message.source.tensor, remote[source_key], frames)
        return result

    def _overlapped(
        self,
        halo: Halo,
        etype: CanonicalEType,
        reduction: Reduction,
        again: Again,
        keeps_rows: bool,
    ) -> tuple[Tensor, dict[LeafKey, Tensor]]:
        """Result and remote rows of a pass over own and remote rows.

        Args:
            halo: The remote rows.
            etype: The relation.
            reduction: What to compute.
            again: See `ShardPass`.
            keeps_rows: Keep remote rows of constants; where the result is kept, nobody asks again.
        """
        constants = self.structure.constants
        known = {}
        for leaf in reduction.leaves():
            rows = _known_rows(constants, halo, leaf.tensor) if leaf.target == "u" else None
            if rows is not None:
                known[leaf.key] = rows
        walk = ShardPass(
            Whole(halo, self.mode.halo_dtype),
            [(etype, reduction)],
            True,
            self.mode.prefetch,
            self.structure.device,
            known,
            again,
        )
        sources = list(walk.sources)
        ((result,),) = walk.run()
        remote = walk.take_remote()
        for leaf in sources:
            if keeps_rows and leaf.key not in known:
                _keep_rows(constants, halo, leaf.tensor, remote[leaf.key])
        return result, remote


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; inference tensors do not say."""
    return 0 if tensor.is_inference() else tensor._version


def _sum_of_sources(
    fields: RelationFields, message: Any, reduce: Any
) -> tuple[str, CopySource | Weighted] | None:
    """The source field and the message of a sum that a pass can take; None for any other."""
    if not isinstance(message, MessageFunction) or not isinstance(reduce, ReduceFunction):
        return None
    if reduce.op not in ("sum", "mean"):
        return None
    left, right = message.lhs_target, message.rhs_target
    if right is None or message.rhs_field is None:
        name = message.lhs_field
        return (name, CopySource(fields.src[name])) if left == "u" else None
    if {left, right} != {"u", "e"} or message.op == "dot":
        return None
    if left == "e" and message.op not in ("add", "mul"):
        return None
    name, edge = message.lhs_field, message.rhs_field
    if left == "e":
        name, edge = edge, name
    value = fields.edge[edge]
    if not isinstance(value, Tensor):
        return None
    return name, Weighted(message.op, fields.src[name], EdgeRows(value))
