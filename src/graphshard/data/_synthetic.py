# SPDX-License-Identifier: Apache-2.0
"""Made-up graphs for tests and benchmarks, the same for the same seed.

`random_graph` has no structure at all, which is the worst case for any partition; `community_graph`
has what real graphs have: communities, hubs, and labels that can be learned from features and
neighbours; `random_typed_graph` has several node types and relations.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..graph import Graph, graph, heterograph

_SPLIT = (0.5, 0.2)
"""Share of nodes in the train and in the validation set; the rest are the test set."""


def random_graph(
    num_nodes: int,
    num_edges: int,
    seed: int = 0,
    *,
    feat_dim: int = 0,
    num_classes: int = 0,
    idtype: torch.dtype = torch.int64,
) -> Graph:
    """A graph whose edges join nodes drawn uniformly; loops and parallel edges may occur.

    Args:
        feat_dim: Width of ``ndata['feat']``, standard normal float32; 0 stores none.
        num_classes: Classes of ``ndata['label']``, drawn uniformly, stored with the three split
            masks; 0 stores none of them.
        idtype: int32 or int64.

    Raises:
        ValueError: A count is negative, or there are edges but no nodes.

    Example:
        >>> g = random_graph(100, 500, seed=1, feat_dim=8, num_classes=3)
        >>> g.num_edges(), tuple(g.ndata['feat'].shape)
        (500, (100, 8))
    """
    _check_counts(num_nodes=num_nodes, num_edges=num_edges, feat_dim=feat_dim)
    rng = np.random.default_rng(seed)
    g = graph(_uniform_edges(rng, num_nodes, num_nodes, num_edges, idtype), num_nodes=num_nodes)
    g.ndata.update(_node_fields(rng, num_nodes, feat_dim, num_classes))
    return g


def community_graph(
    num_nodes: int,
    num_edges: int,
    num_communities: int = 200,
    *,
    inside: float = 0.7,
    hub_exponent: float = 0.6,
    feat_dim: int = 0,
    num_classes: int = 0,
    noise: float = 1.0,
    seed: int = 0,
    idtype: torch.dtype = torch.int64,
) -> Graph:
    """A graph with communities and hubs: simple, both directions, no self loops.

    Sources are drawn with a weight that falls as ``rank ** -hub_exponent`` in a random order of the
    nodes, so that some nodes have very many edges. A destination is, with probability ``inside``, a
    node of the source's community, its early members more often, and otherwise drawn as the sources
    are. Features are the centre of the community plus noise.

    Args:
        num_edges: Number of draws. Each that is new and no loop gives two directed edges, so the
            graph has at most ``2 * num_edges``.
        num_communities: Communities; ``ndata['community']`` (int64) says which a node is in.
        inside: Share of draws within a community, 0 to 1.
        hub_exponent: How unequal degrees are; 0 makes them alike.
        feat_dim: Width of ``ndata['feat']`` (float32); 0 stores none.
        num_classes: ``ndata['label']`` is the community modulo this, stored with the three split
            masks; 0 stores none of them.
        noise: Standard deviation of what is added to a centre, whose own is 0.3.
        idtype: int32 or int64.

    Returns:
        The graph; edges are ordered by source, then destination.

    Raises:
        ValueError: A count is negative, ``inside`` is no share, or there are edges but no nodes.
    """
    _check_counts(num_nodes=num_nodes, num_edges=num_edges, feat_dim=feat_dim)
    if num_communities < 1:
        raise ValueError(f"num_communities must be at least 1 (got {num_communities})")
    if not 0.0 <= inside <= 1.0:
        raise ValueError(f"inside must be a share from 0 to 1 (got {inside})")
    if num_edges and not num_nodes:
        raise ValueError(f"a graph without nodes has no edges (got num_edges={num_edges})")
    rng = np.random.default_rng(seed)
    community = rng.integers(0, num_communities, num_nodes)
    src, dst = _community_edges(rng, community, num_edges, num_communities, inside, hub_exponent)
    ends = torch.from_numpy(src).to(idtype), torch.from_numpy(dst).to(idtype)
    g = graph(ends, num_nodes=num_nodes)
    g.ndata["community"] = torch.from_numpy(community)
    if feat_dim:
        centre = 0.3 * rng.standard_normal((num_communities, feat_dim), dtype=np.float32)
        own = rng.standard_normal((num_nodes, feat_dim), dtype=np.float32)
        g.ndata["feat"] = torch.from_numpy(centre[community] + np.float32(noise) * own)
    if num_classes:
        g.ndata["label"] = torch.from_numpy(community % num_classes)
        g.ndata.update(_split_masks(rng, num_nodes))
    return g


def random_typed_graph(
    num_nodes: Mapping[str, int],
    num_edges: Mapping[CanonicalEType, int],
    seed: int = 0,
    *,
    feat_dim: int | Mapping[str, int] = 0,
    num_classes: int = 0,
    target: str | None = None,
    idtype: torch.dtype = torch.int64,
) -> Graph:
    """A typed graph whose edges join nodes drawn uniformly.

    Args:
        seed: Chooses the graph; the order in which types and relations are given does not.
        feat_dim: Width of each type's ``'feat'`` (float32), one for all or one per type; 0 stores
            none.
        num_classes: Classes of the target type's ``'label'``, stored with the three split masks;
            0 stores none of them.
        target: The type that is labelled; None means the first in alphabetical order.
        idtype: int32 or int64.

    Raises:
        ValueError: A count is negative, a type is not in ``num_nodes``, or there are edges but no
            nodes to join.

    Example:
        >>> g = random_typed_graph({'a': 5, 'b': 3}, {('a', 'to', 'b'): 7})
        >>> g.num_edges('to')
        7
    """
    target = min(num_nodes, default=None) if target is None else target
    named = {t for etype in num_edges for t in etype[::2]} | ({target} if target else set())
    if missing := sorted(named - set(num_nodes)):
        raise ValueError(f"every node type must have a count in num_nodes (missing: {missing})")
    widths = feat_dim if isinstance(feat_dim, Mapping) else dict.fromkeys(num_nodes, feat_dim)
    rng = np.random.default_rng(seed)
    edges = {}
    for etype in sorted(num_edges):
        num_src, num_dst = num_nodes[etype[0]], num_nodes[etype[2]]
        _check_counts(num_src=num_src, num_dst=num_dst, num_edges=num_edges[etype])
        edges[etype] = _uniform_edges(rng, num_src, num_dst, num_edges[etype], idtype)
    g = heterograph(edges, num_nodes_dict=dict(num_nodes), idtype=idtype)
    for ntype in sorted(num_nodes):
        classes = num_classes if ntype == target else 0
        fields = _node_fields(rng, num_nodes[ntype], widths.get(ntype, 0), classes)
        g.nodes[ntype].data.update(fields)
    return g


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            raise ValueError(f"{name} must not be negative (got {count})")


def _uniform_edges(
    rng: np.random.Generator, num_src: int, num_dst: int, num_edges: int, idtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if num_edges and not (num_src and num_dst):
        raise ValueError(f"a graph without nodes has no edges (got num_edges={num_edges})")
    src = rng.integers(0, max(num_src, 1), num_edges)
    dst = rng.integers(0, max(num_dst, 1), num_edges)
    return torch.from_numpy(src).to(idtype), torch.from_numpy(dst).to(idtype)


def _community_edges(
    rng: np.random.Generator,
    community: np.ndarray,
    num_edges: int,
    num_communities: int,
    inside: float,
    hub_exponent: float,
) -> tuple[np.ndarray, np.ndarray]:
    num_nodes = len(community)
    if not num_edges:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    weight = rng.permutation(np.arange(1, num_nodes + 1, dtype=np.float64) ** -hub_exponent)
    reach = np.cumsum(weight)
    reach /= reach[-1]
    src = np.searchsorted(reach, rng.random(num_edges), side="right")
    anywhere = np.searchsorted(reach, rng.random(num_edges), side="right")

    members = np.argsort(community, kind="stable")
    first = np.searchsorted(community[members], np.arange(num_communities + 1))
    size = np.diff(first)[community[src]]
    offset = (rng.random(num_edges) ** 2 * size).astype(np.int64)  # squared: early members are hubs
    near = members[first[community[src]] + offset]

    dst = np.where(rng.random(num_edges) < inside, near, anywhere)
    keep = src != dst
    src, dst = src[keep], dst[keep]
    key = np.concatenate([src * num_nodes + dst, dst * num_nodes + src])
    key.sort()  # numpy.unique hashes, which takes five times as long on these keys
    key = key[np.diff(key, prepend=-1) != 0]
    return key // num_nodes, key % num_nodes


def _node_fields(
    rng: np.random.Generator, num_nodes: int, feat_dim: int, num_classes: int
) -> dict[str, Tensor]:
    fields = {}
    if feat_dim:
        feat = rng.standard_normal((num_nodes, feat_dim), dtype=np.float32)
        fields["feat"] = torch.from_numpy(feat)
    if num_classes:
        fields["label"] = torch.from_numpy(rng.integers(0, num_classes, num_nodes))
        fields.update(_split_masks(rng, num_nodes))
    return fields


def _split_masks(rng: np.random.Generator, num_nodes: int) -> dict[str, Tensor]:
    train, val = _SPLIT
    draw = torch.from_numpy(rng.random(num_nodes))
    return {
        "train_mask": draw < train,
        "val_mask": (draw >= train) & (draw < train + val),
        "test_mask": draw >= train + val,
    }
