# SPDX-License-Identifier: Apache-2.0
"""Made-up graphs: counts, repeatability, and the structure they promise. No process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from graphshard.data import NodeDataset, community_graph, random_graph, random_typed_graph
from graphshard.graph import Graph


def typed(seed: int) -> Graph:
    return random_typed_graph(
        {"a": 30, "b": 20, "alone": 4},
        {("a", "to", "b"): 70, ("b", "to", "b"): 5, ("b", "back", "a"): 0},
        seed,
        feat_dim={"a": 3, "b": 5},
        num_classes=4,
        target="b",
    )


MAKERS: dict[str, Callable[[int], Graph]] = {
    "random": lambda seed: random_graph(50, 300, seed, feat_dim=4, num_classes=3),
    "community": lambda seed: community_graph(
        200, 600, 10, feat_dim=4, num_classes=3, seed=seed, idtype=torch.int32
    ),
    "typed": typed,
}


def everything(g: Graph) -> list[torch.Tensor]:
    out = [side for etype in g.canonical_etypes for side in g.edges(etype=etype)]
    for ntype in g.ntypes:
        out += [value for _, value in sorted(g.nodes[ntype].data.items())]
    return out


@pytest.mark.parametrize("name", MAKERS)
def test_the_seed_is_all_that_counts(name: str) -> None:
    first, again, other = MAKERS[name](3), MAKERS[name](3), MAKERS[name](4)
    pairs = zip(everything(first), everything(again), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert any(
        a.shape != b.shape or not torch.equal(a, b)
        for a, b in zip(everything(first), everything(other), strict=True)
    )
    data = NodeDataset.from_graph(first)
    masks = [first.nodes[data.target].data[f"{s}_mask"].int() for s in ("train", "val", "test")]
    assert (sum(masks) == 1).all()


def test_random_graph() -> None:
    g = MAKERS["random"](0)
    assert (g.num_nodes(), g.num_edges()) == (50, 300)
    assert g.ndata["feat"].shape == (50, 4)
    assert set(g.ndata["label"].tolist()) == {0, 1, 2}
    assert random_graph(0, 0).num_nodes() == 0
    assert not list(random_graph(5, 3).ndata)


def test_community_graph_is_simple_and_has_both_directions() -> None:
    g = community_graph(300, 2000, 12, seed=1)
    src, dst = g.edges()
    key = src * 300 + dst
    assert (key[1:] > key[:-1]).all(), "sorted by source, then destination, without parallels"
    assert (src != dst).all()
    assert torch.equal(key, torch.unique(dst * 300 + src))
    assert g.num_edges() <= 4000


def test_community_graph_has_communities_and_hubs() -> None:
    def share_inside(g: Graph) -> float:
        src, dst = g.edges()
        community = g.ndata["community"]
        return float((community[src] == community[dst]).float().mean())

    assert share_inside(community_graph(2000, 8000, 20, inside=0.9)) > 0.7
    assert share_inside(community_graph(2000, 8000, 20, inside=0.0)) < 0.15
    hubs = community_graph(2000, 8000, 20, hub_exponent=0.9).in_degrees().max()
    assert (
        hubs > 2 * community_graph(2000, 8000, 20, inside=0.0, hub_exponent=0.0).in_degrees().max()
    )


def test_community_features_and_labels_follow_the_community() -> None:
    g = community_graph(3000, 1, 4, feat_dim=64, num_classes=3, noise=0.1)
    community, feat = g.ndata["community"].numpy(), g.ndata["feat"].numpy()
    centres = np.stack([feat[community == c].mean(0) for c in range(4)])
    nearest = ((feat[:, None] - centres[None]) ** 2).sum(2).argmin(1)
    assert (nearest == community).all()
    assert (g.ndata["label"].numpy() == community % 3).all()


def test_typed_graph() -> None:
    g = typed(0)
    assert g.ntypes == ["a", "alone", "b"]
    assert [g.num_edges(e) for e in g.canonical_etypes] == [70, 0, 5]
    assert g.nodes["a"].data["feat"].shape == (30, 3)
    assert "feat" not in g.nodes["alone"].data
    assert "label" in g.nodes["b"].data
    assert "label" not in g.nodes["a"].data
    turned = random_typed_graph(
        {"b": 20, "alone": 4, "a": 30},
        {("b", "back", "a"): 0, ("b", "to", "b"): 5, ("a", "to", "b"): 70},
        0,
        feat_dim={"b": 5, "a": 3},
        num_classes=4,
        target="b",
    )
    pairs = zip(everything(g), everything(turned), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


def test_errors() -> None:
    with pytest.raises(ValueError, match="num_edges must not be negative"):
        random_graph(3, -1)
    with pytest.raises(ValueError, match="a graph without nodes has no edges"):
        random_graph(0, 1)
    with pytest.raises(ValueError, match="a graph without nodes has no edges"):
        community_graph(0, 1)
    with pytest.raises(ValueError, match="num_communities must be at least 1"):
        community_graph(5, 1, 0)
    with pytest.raises(ValueError, match="inside must be a share"):
        community_graph(5, 1, inside=1.5)
    with pytest.raises(ValueError, match=r"a count in num_nodes \(missing: \['b'\]\)"):
        random_typed_graph({"a": 1}, {("a", "r", "b"): 1})
