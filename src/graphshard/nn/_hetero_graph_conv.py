# SPDX-License-Identifier: Apache-2.0
"""HeteroGraphConv: one layer per relation, and their results joined per node type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .._base.typing import CanonicalEType, EType, TensorDict, TensorMapping
from ..graph import MessagePassingGraph
from ..ops import is_hooked
from ._typed import module_name

Aggregate: TypeAlias = Callable[[list[Tensor], str], Tensor]


def _sum(tensors: list[Tensor], ntype: str) -> Tensor:
    return reduce(torch.add, tensors)


def _mean(tensors: list[Tensor], ntype: str) -> Tensor:
    return _sum(tensors, ntype) / len(tensors)


def _max(tensors: list[Tensor], ntype: str) -> Tensor:
    return torch.stack(tensors).max(dim=0).values


def _min(tensors: list[Tensor], ntype: str) -> Tensor:
    return torch.stack(tensors).min(dim=0).values


def _stack(tensors: list[Tensor], ntype: str) -> Tensor:
    return torch.stack(tensors, dim=1)


AGGREGATES: dict[str, Aggregate] = {
    "sum": _sum,
    "max": _max,
    "min": _min,
    "mean": _mean,
    "stack": _stack,
}


def _start(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The steps of a layer that aggregates in steps; of any other, and with hooks, its result."""
    steps = vars(type(layer)).get("_steps")
    if steps is None or is_hooked(layer):
        return layer(*args, **kwargs)
    return steps(layer, *args, **kwargs)


def _sums_rows(layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a layer that aggregates in steps reads source rows to add them up, as they are."""
    has_steps = "_steps" in vars(type(layer)) and not is_hooked(layer)
    is_weighted = len(args) > 0 or kwargs.get("edge_weight") is not None
    return has_steps and not is_weighted and bool(getattr(layer, "sums_rows", False))


class HeteroGraphConv(nn.Module):
    r"""Applies a layer to each relation of a typed graph.

    As `Modeling Relational Data with Graph Convolutional Networks
    <https://arxiv.org/abs/1703.06103>`_ does with linear layers:

    .. math::
        h'_{T} = \mathrm{aggregate}_{(S, r, T)} \; \mathrm{layer}_r\big(G_r, (h_S, h_T)\big)

    over the relations whose destination type is :math:`T`, in the order of
    ``graph.canonical_etypes``. The layer of a relation without edges is called too, so that what
    it computes from the destination nodes alone is there whether or not edges were sampled. On a
    sharded graph each source type is fetched once for all its relations; in sequential mode where
    `SAGEConv`, `GraphConv` or `GINConv` aggregate the same rows. Where all of them add up rows as
    they are, partial sums may travel in place of rows.

    Args:
        mods: The layer of each relation, by relation name or canonical triple. A layer is called
            with one relation of the graph and a pair of tensors. Layers that refuse nodes without
            in-edges are set to accept them.
        aggregate: ``sum``, ``max``, ``min``, ``mean``, ``stack`` (a new dimension 1), or a function
            of a list of tensors and the name of the node type.

    Raises:
        ValueError: Unknown ``aggregate``; a relation of the graph has no layer; a layer needs
            features of a destination type that ``inputs`` lacks.

    Example:
        >>> import torch
        >>> from graphshard.graph import heterograph
        >>> from graphshard.nn import GraphConv, HeteroGraphConv, SAGEConv
        >>> edges = (torch.tensor([0, 1]), torch.tensor([1, 0]))
        >>> g = heterograph({("user", "knows", "user"): edges, ("user", "plays", "game"): edges})
        >>> layer = HeteroGraphConv({"knows": GraphConv(4, 2), "plays": SAGEConv(4, 2, "mean")})
        >>> out = layer(g, {"user": torch.ones(2, 4), "game": torch.ones(2, 4)})
        >>> {ntype: tuple(rows.shape) for ntype, rows in out.items()}
        {'game': (2, 2), 'user': (2, 2)}
    """

    def __init__(self, mods: Mapping[Any, nn.Module], aggregate: str | Aggregate = "sum") -> None:
        super().__init__()
        if isinstance(aggregate, str) and aggregate not in AGGREGATES:
            raise ValueError(
                f"aggregate must be a function or one of {', '.join(AGGREGATES)} "
                f"(got {aggregate!r})"
            )
        self.mods = nn.ModuleDict({module_name(key): layer for key, layer in mods.items()})
        self.agg_fn = AGGREGATES[aggregate] if isinstance(aggregate, str) else aggregate
        for layer in self.mods.values():
            allow = getattr(layer, "set_allow_zero_in_degree", None)
            if callable(allow):
                allow(True)

    def _layer(self, relation: CanonicalEType) -> nn.Module:
        """The layer of a relation: the one given for the triple, else for the name."""
        for key in (module_name(relation), module_name(relation[1])):
            if key in self.mods:
                return self.mods[key]
        raise ValueError(
            f"every relation of the graph needs a layer in mods: {relation} has none (mods has "
            f"{list(self.mods)}); add one under its name or triple"
        )

    def forward(
        self,
        g: MessagePassingGraph,
        inputs: TensorMapping | tuple[TensorMapping, TensorMapping],
        mod_args: Mapping[EType, Sequence[Any]] | None = None,
        mod_kwargs: Mapping[EType, Mapping[str, Any]] | None = None,
    ) -> TensorDict:
        """Apply the layers.

        Args:
            inputs: Node features by node type, or a pair (by source type, by destination type).
                On a block, one mapping holds source nodes, and destination nodes are their first
                rows. Relations whose source type is missing are left out; so are, on a block or
                with a pair, relations whose destination type is missing.
            mod_args: Further positional arguments by relation name or triple.
            mod_kwargs: Keyword arguments by relation name or triple.

        Returns:
            The joined results by destination node type; types that nothing reached are absent.
        """
        mod_args, mod_kwargs = mod_args or {}, mod_kwargs or {}
        source, destination = inputs if isinstance(inputs, tuple) else (inputs, inputs)
        if g.is_block and not isinstance(inputs, tuple):
            destination = {t: source[t][: g.num_dst_nodes(t)] for t in g.dsttypes if t in source}
        skip_missing = isinstance(inputs, tuple) or g.is_block
        relations = [
            relation
            for relation in g.canonical_etypes
            if relation[0] in source and (relation[2] in destination or not skip_missing)
        ]
        layers = [self._layer(relation) for relation in relations]
        used = {relation[0] for relation in relations}
        arguments = [
            (
                mod_args.get(relation, mod_args.get(relation[1], ())),
                mod_kwargs.get(relation, mod_kwargs.get(relation[1], {})),
            )
            for relation in relations
        ]
        are_summed = all(
            _sums_rows(layer, *given) for layer, given in zip(layers, arguments, strict=True)
        )
        rows = {ntype: x for ntype, x in source.items() if ntype in used}
        local, rows = g.localize(rows, are_summed=are_summed)
        calls = []
        for relation, layer, (args, kwargs) in zip(relations, layers, arguments, strict=True):
            ends = rows[relation[0]], destination.get(relation[2])
            calls.append(partial(_start, layer, local[relation], ends, *args, **kwargs))
        outputs: dict[str, list[Tensor]] = {ntype: [] for ntype in g.dsttypes}
        for relation, result in zip(relations, local.together(calls), strict=True):
            outputs[relation[2]].append(result)
        return {ntype: self.agg_fn(parts, ntype) for ntype, parts in outputs.items() if parts}
