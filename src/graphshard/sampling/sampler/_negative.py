# SPDX-License-Identifier: Apache-2.0
"""PerSourceUniform, GlobalUniform: pairs of nodes to tell from the edges of a batch.

A negative sampler is anything that is called with a graph and edge ids and returns pairs; a user's
own may be a plain function. Those here draw for each edge by its id, as [Note: keyed draws] says of
neighbours: the same negatives come out whatever else is in the batch and on whichever rank it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType, EType
from ...ops.counter_random import below, key_state, states, unit, word
from ..graph_store import graph_store_of
from ._ids import by_relation
from ._neighbor_sampler import DrawSeed

Pairs: TypeAlias = tuple[Tensor, Tensor]
"""Source and destination of each pair."""

NEGATIVES = -1
"""Stands in `DrawSeed.key` where draws of neighbours have the index of a layer."""

_DOMAIN = 0x2545F4914F6CDD1D
_MAX_ROUNDS = 64


class NegativeSampler(ABC):
    """Base of the negative samplers here: called with a graph and edge ids, or relation to ids.

    Args:
        k: Pairs per edge.

    Raises:
        ValueError: ``k`` is not a positive integer.
    """

    def __init__(self, k: int) -> None:
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ValueError(f"k must be a positive number of pairs per edge (got {k!r})")
        self.k = k

    def __call__(
        self, g: Any, eids: Any, draw_seed: DrawSeed | None = None
    ) -> Pairs | dict[CanonicalEType, Pairs]:
        """Negative pairs for some edges.

        Args:
            g: The graph: a `Graph`, or a `graphshard.servers.DistGraph`.
            eids: Edge ids, or relation to ids.
            draw_seed: Which draw to make; by default one from torch's generator.

        Returns:
            ``(sources, destinations)``, or relation to that where ``eids`` is a dictionary.

        Raises:
            TypeError: Ids without a relation on a graph of several.
            ValueError: An unknown relation, or an id that is out of range.
        """
        draw_seed = DrawSeed.fresh() if draw_seed is None else draw_seed
        pairs = {}
        for etype, of_relation in (by_relation(graph_store_of(g), eids, "eids") or {}).items():
            key = draw_seed.key(NEGATIVES, g.canonical_etypes.index(etype))
            streams = states(key_state(key, _DOMAIN), of_relation.to(torch.int64))
            source, destination = self._pairs(g, etype, of_relation, streams)
            pairs[etype] = source.to(g.idtype), destination.to(g.idtype)
        return pairs if isinstance(eids, Mapping) else next(iter(pairs.values()))

    @abstractmethod
    def _pairs(self, g: Any, etype: CanonicalEType, eids: Tensor, streams: Tensor) -> Pairs:
        """Pairs for the edges of one relation, from one stream of random words for each."""


class PerSourceUniform(NegativeSampler):
    """Keeps the source of each edge and draws ``k`` destinations for it, any node alike.

    A pair may by chance be an edge of the graph; `GlobalUniform` draws none that is.

    Args:
        k: Pairs per edge.

    Example:
        >>> from graphshard.graph import graph
        >>> g = graph(([0, 1, 2], [1, 2, 3]))
        >>> source, destination = PerSourceUniform(2)(g, torch.tensor([1, 2]))
        >>> source, len(destination)
        (tensor([1, 1, 2, 2]), 4)
    """

    def _pairs(self, g: Any, etype: CanonicalEType, eids: Tensor, streams: Tensor) -> Pairs:
        source = g.find_edges(eids, etype=etype)[0]
        words = word(streams[:, None], torch.arange(self.k, device=streams.device))
        destination = _any_of(g.num_nodes(etype[2]), words.view(-1))
        return source.repeat_interleave(self.k), destination


Uniform = PerSourceUniform


class GlobalUniform(NegativeSampler):
    """Draws both ends among all nodes; what is an edge of the graph is drawn anew.

    On a graph that is so dense that free pairs are hard to hit, there may be fewer than ``k`` for
    an edge.

    Args:
        k: Pairs per edge.
        exclude_self_loops: Draw no pair of a node with itself.
        replace: Whether a pair may appear several times among those for one batch.
        redundancy: At most ``1 + redundancy`` tries for each pair; by default many.

    Raises:
        ValueError: ``k`` is not a positive integer, or ``redundancy`` is negative.

    Example:
        >>> from graphshard.graph import graph
        >>> g = graph(([0, 1, 2], [1, 2, 3]))
        >>> source, destination = GlobalUniform(2)(g, torch.tensor([1, 2]))
        >>> len(source), g.has_edges_between(source, destination).any()
        (4, tensor(False))
    """

    def __init__(
        self,
        k: int,
        exclude_self_loops: bool = True,
        replace: bool = False,
        redundancy: float | None = None,
    ) -> None:
        super().__init__(k)
        self.exclude_self_loops, self.replace = exclude_self_loops, replace
        self.max_rounds = _rounds(redundancy)

    def _pairs(self, g: Any, etype: CanonicalEType, eids: Tensor, streams: Tensor) -> Pairs:
        return _free_pairs(
            g, etype, streams, self.k, self.exclude_self_loops, self.replace, self.max_rounds
        )


def global_uniform_negative_sampling(
    g: Any,
    num_samples: int,
    exclude_self_loops: bool = True,
    replace: bool = False,
    etype: EType | None = None,
    redundancy: float | None = None,
) -> Pairs:
    """Draw pairs of nodes that no edge of a relation joins; see `GlobalUniform`.

    Args:
        g: A graph of this process.
        num_samples: How many pairs; where free pairs are hard to hit, there may be fewer.
        exclude_self_loops: Draw no pair of a node with itself.
        replace: Whether a pair may appear several times.
        etype: The relation; by default the first.
        redundancy: At most ``1 + redundancy`` tries for each pair; by default many.

    Returns:
        ``(sources, destinations)``, in the graph's idtype.

    Raises:
        ValueError: ``num_samples`` or ``redundancy`` is negative, or an unknown relation.

    Example:
        >>> from graphshard.graph import graph
        >>> g = graph(([0, 1, 2], [1, 2, 3]))
        >>> source, destination = global_uniform_negative_sampling(g, 4)
        >>> len(source), g.has_edges_between(source, destination).any()
        (4, tensor(False))
    """
    if num_samples < 0:
        raise ValueError(f"num_samples must not be negative (got {num_samples})")
    relation = g.canonical_etypes[0] if etype is None else g.to_canonical_etype(etype)
    key = DrawSeed.fresh().key(NEGATIVES, g.canonical_etypes.index(relation))
    streams = states(key_state(key, _DOMAIN), torch.arange(int(num_samples), device=g.device))
    rounds = _rounds(redundancy)
    source, destination = _free_pairs(g, relation, streams, 1, exclude_self_loops, replace, rounds)
    return source.to(g.idtype), destination.to(g.idtype)


def _rounds(redundancy: float | None) -> int:
    if redundancy is not None and redundancy < 0:
        raise ValueError(f"redundancy must not be negative (got {redundancy})")
    return _MAX_ROUNDS if redundancy is None else 1 + int(-(-redundancy // 1))


def _free_pairs(
    g: Any,
    etype: CanonicalEType,
    streams: Tensor,
    k: int,
    exclude_self_loops: bool,
    replace: bool,
    max_rounds: int,
) -> Pairs:
    """``k`` pairs from each stream of random words, of nodes that no edge of a relation joins."""
    source_type, _, target_type = etype
    num_src, num_dst = g.num_nodes(source_type), g.num_nodes(target_type)
    num_streams = streams.numel()
    streams = streams.repeat_interleave(k)
    slot = torch.arange(k, device=streams.device).repeat(num_streams)
    code = torch.full_like(streams, -1)
    open_slots = torch.arange(streams.numel(), device=streams.device)
    if num_src == 0 or num_dst == 0:
        open_slots = open_slots[:0]
    for attempt in range(max_rounds):
        if open_slots.numel() == 0:
            break
        counter = 2 * (attempt * k + slot[open_slots])
        source = _any_of(num_src, word(streams[open_slots], counter))
        destination = _any_of(num_dst, word(streams[open_slots], counter + 1))
        good = ~g.has_edges_between(source.to(g.idtype), destination.to(g.idtype), etype=etype)
        if exclude_self_loops and source_type == target_type:
            good &= source != destination
        found = source * num_dst + destination
        if not replace:
            good &= ~torch.isin(found, code)
            good &= _is_first(found, good)
        code[open_slots[good]] = found[good]
        open_slots = open_slots[~good]
    code = code[code >= 0]
    return code // max(num_dst, 1), code % max(num_dst, 1)


def _any_of(count: int, words: Tensor) -> Tensor:
    """A number in [0, count) from each random word."""
    if count < 2**31:
        return below(words, count)
    return (unit(words) * count).to(torch.int64).clamp_(max=count - 1)


def _is_first(values: Tensor, counted: Tensor) -> Tensor:
    """Which of the values that count are the first of their kind."""
    places = torch.arange(values.numel(), device=values.device)
    places = torch.where(counted, places, values.numel())
    _, group = torch.unique(values, return_inverse=True)
    first = torch.full_like(places, values.numel()).scatter_reduce(0, group, places, "amin")
    return counted & (first[group] == places)
