# SPDX-License-Identifier: Apache-2.0
"""Batches of edges: pair graphs, negative pairs, blocks; plain and typed. No process group."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from loader_cases import BOTH, block_edges, dgl, ends, plain, typed
from torch import Tensor

from graphshard.dgl.dataloading import (
    DataLoader,
    EdgeDataLoader,
    EdgePredictionSampler,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    NodeDataLoader,
    Sampler,
    as_edge_prediction_sampler,
)
from graphshard.dgl.dataloading.negative_sampler import GlobalUniform, Uniform
from graphshard.graph import EID, NID

IDTYPES = [torch.int32, torch.int64]
BUYS, KNOWS = ("user", "buys", "item"), ("user", "knows", "user")


def batches(module: Any, g: Any, indices: Any, size: int, **options: Any) -> list[Any]:
    sampler = module.dataloading.as_edge_prediction_sampler(
        module.dataloading.MultiLayerFullNeighborSampler(2), **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DGL advises on CPU affinity
        return list(module.dataloading.DataLoader(g, indices, sampler, batch_size=size))


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("idtype", IDTYPES)
def test_as_dgl_plain(idtype: torch.dtype, negative: bool) -> None:
    def run(module: Any) -> list[Any]:
        kind = torch.int64 if module is dgl else idtype  # its int32 blocks lack some nodes
        options = {"exclude": "self"}
        if negative:  # every node, so that inputs do not depend on the draw
            options["negative_sampler"] = lambda g, eids: (
                torch.arange(20, dtype=kind),
                torch.arange(20, dtype=kind).flip(0),
            )
        return batches(module, plain(module, kind), torch.arange(7, 20, dtype=kind), 5, **options)

    for ours, theirs in zip(run(BOTH[0]), run(BOTH[1]), strict=True):
        assert len(ours) == len(theirs) == 3 + negative
        assert sorted(ours[0].tolist()) == sorted(theirs[0].tolist())
        for pair_graph, of_dgl in zip(ours[1:-1], theirs[1:-1], strict=True):
            assert ends(pair_graph) == ends(of_dgl)
            assert pair_graph.num_nodes() == of_dgl.num_nodes()
        for block, of_dgl in zip(ours[-1], theirs[-1], strict=True):
            assert block_edges(block) == block_edges(of_dgl)


@pytest.mark.parametrize("idtype", IDTYPES)
def test_as_dgl_typed(idtype: torch.dtype) -> None:
    def run(module: Any) -> list[Any]:
        kind = torch.int64 if module is dgl else idtype
        indices = {
            "buys": torch.arange(5, dtype=kind),
            "knows": torch.arange(7, dtype=kind),
        }
        return batches(module, typed(module, kind), indices, 4, exclude="self")

    for (inputs, pairs, blocks), (dgl_in, dgl_pairs, dgl_blocks) in zip(
        run(BOTH[0]), run(BOTH[1]), strict=True
    ):
        assert {t: sorted(ids.tolist()) for t, ids in inputs.items()} == {
            t: sorted(ids.tolist()) for t, ids in dgl_in.items()
        }
        assert pairs.canonical_etypes == dgl_pairs.canonical_etypes
        for etype in pairs.canonical_etypes:
            assert ends(pairs, etype) == ends(dgl_pairs, etype)
        for block, of_dgl in zip(blocks, dgl_blocks, strict=True):
            assert block_edges(block) == block_edges(of_dgl)


def check_plain(g: Any, seeds: Tensor, batch: Any, per_edge: int | None) -> None:
    """What holds for every batch of a plain graph."""
    inputs, pairs, *negative, blocks = batch
    assert torch.equal(pairs.edata[EID], seeds)
    source, destination = g.find_edges(seeds)
    assert ends(pairs) == list(zip(source.tolist(), destination.tolist(), strict=True))
    assert torch.equal(pairs.edata["weight"], g.edata["weight"][seeds.long()])
    assert torch.equal(pairs.ndata["feat"], g.ndata["feat"][pairs.ndata[NID].long()])
    assert torch.equal(blocks[-1].dstdata[NID], pairs.ndata[NID])
    assert torch.equal(blocks[0].srcdata[NID], inputs)
    assert len(pairs.ndata[NID].unique()) == pairs.num_nodes()
    assert pairs.idtype == inputs.dtype == blocks[0].idtype == g.idtype
    touched = torch.cat([*pairs.edges(), *(e for n in negative for e in n.edges())])
    assert torch.equal(touched.unique().long(), torch.arange(pairs.num_nodes()))
    assert len(negative) == (per_edge is not None)
    for g_neg in negative:
        assert g_neg.num_edges() == per_edge * len(seeds)
        assert torch.equal(g_neg.ndata[NID], pairs.ndata[NID])
        assert torch.equal(g_neg.ndata["feat"], pairs.ndata["feat"])


@pytest.mark.parametrize(
    "negative", [None, Uniform(3), GlobalUniform(2)], ids=["none", "source", "global"]
)
@pytest.mark.parametrize("sampler", [NeighborSampler([3, 2]), LaborSampler([3])], ids=["", "l"])
@pytest.mark.parametrize("idtype", IDTYPES)
def test_plain(idtype: torch.dtype, sampler: Any, negative: Any) -> None:
    g = plain(idtype=idtype)
    seeds = torch.tensor([50, 3, 119, 7, 4, 3], dtype=idtype)  # one twice
    edge_sampler = as_edge_prediction_sampler(sampler, "self", negative_sampler=negative)
    loader = DataLoader(g, seeds, edge_sampler, batch_size=4)
    per_edge = None if negative is None else negative.k
    for part, batch in zip(seeds.split(4), loader, strict=True):
        check_plain(g, part, batch, per_edge)


@pytest.mark.parametrize("idtype", IDTYPES)
def test_typed(idtype: torch.dtype) -> None:
    g = typed(idtype=idtype)
    sampler = as_edge_prediction_sampler(
        NeighborSampler([3, 2]),
        exclude="reverse_types",
        reverse_etypes={"buys": "bought_by"},
        negative_sampler=Uniform(2),
    )
    loader = DataLoader(g, {"buys": range(6), KNOWS: range(4)}, sampler, batch_size=5, shuffle=True)
    seen: dict[Any, list[int]] = {e: [] for e in g.canonical_etypes}
    for inputs, pairs, negative, blocks in loader:
        assert pairs.canonical_etypes == negative.canonical_etypes == g.canonical_etypes
        for etype in g.canonical_etypes:
            eids = pairs.edges[etype].data[EID]
            seen[etype] += eids.tolist()
            assert [list(x) for x in zip(*ends(pairs, etype), strict=True)] == [
                x.tolist() for x in g.find_edges(eids, etype=etype) if len(eids)
            ]
            assert negative.num_edges(etype) == 2 * len(eids)
            sources = [u for u, _ in ends(pairs, etype) for _ in range(2)]
            assert [u for u, _ in ends(negative, etype)] == sources
        excluded = set(pairs.edges["buys"].data[EID].tolist())
        for block in blocks:
            assert not excluded & set(block.edges["buys"].data[EID].tolist())
            assert not excluded & set(block.edges["bought_by"].data[EID].tolist())
        for ntype in g.ntypes:
            ids = pairs.nodes[ntype].data[NID]
            assert torch.equal(blocks[-1].dstnodes[ntype].data[NID], ids)
            assert torch.equal(inputs[ntype], blocks[0].srcnodes[ntype].data[NID])
            assert torch.equal(
                pairs.nodes[ntype].data["feat"], g.nodes[ntype].data["feat"][ids.long()]
            )
    assert sorted(seen[BUYS]) == list(range(6))
    assert sorted(seen[KNOWS]) == list(range(4))
    assert seen[("item", "bought_by", "user")] == []


def signature(batch: Any) -> Any:
    inputs, pairs, negative, blocks = batch
    return (
        inputs.tolist(),
        ends(pairs),
        ends(negative),
        [(ends(block), block.edata[EID].tolist()) for block in blocks],
    )


@pytest.mark.parametrize("negative", [Uniform(2), GlobalUniform(2)], ids=["source", "global"])
def test_same_batches_for_any_prefetch(negative: Any) -> None:
    g = plain()
    sampler = as_edge_prediction_sampler(NeighborSampler([2, 2]), "self", negative_sampler=negative)

    def run(prefetch: int, seed: int = 1) -> list[Any]:
        loader = DataLoader(
            g, torch.arange(50), sampler, batch_size=8, shuffle=True, seed=seed, prefetch=prefetch
        )
        return [signature(batch) for _ in range(2) for batch in loader]

    reference = run(0)
    assert len(reference) == 14
    assert run(2) == reference
    assert run(0, seed=2) != reference
    assert reference[:7] != reference[7:]


def test_labels_are_gathered_ahead() -> None:
    inner = NeighborSampler([2], prefetch_node_feats=["feat"])
    sampler = as_edge_prediction_sampler(
        inner, negative_sampler=Uniform(1), prefetch_labels=["weight"]
    )
    for _, pairs, _, blocks in DataLoader(plain(), torch.arange(6), sampler, batch_size=4):
        for data, name in ((pairs.edges["_E"].data, "weight"), (blocks[0].srcnodes["_N"], "feat")):
            frame = getattr(data, "data", data).frame
            assert frame._columns[name]._rows is not None
    wrong = as_edge_prediction_sampler(NeighborSampler([2]), prefetch_labels={"buys": ["nope"]})
    with pytest.raises(ValueError, match="prefetch_labels names 'nope' of 'buys'"):
        wrong.sample(typed(), {"buys": [0]})


def test_older_name() -> None:
    g = plain()
    loader = EdgeDataLoader(
        g,
        torch.arange(6),
        NeighborSampler([2, 2]),
        exclude="self",
        negative_sampler=Uniform(1),
        batch_size=4,
        num_workers=2,
        seed=3,
    )
    same = DataLoader(
        g,
        torch.arange(6),
        as_edge_prediction_sampler(NeighborSampler([2, 2]), "self", negative_sampler=Uniform(1)),
        batch_size=4,
        seed=3,
    )
    assert len(loader) == 2
    assert list(map(signature, loader)) == list(map(signature, same))
    assert issubclass(EdgeDataLoader, DataLoader)
    assert issubclass(NodeDataLoader, DataLoader)


def test_on_another_device() -> None:
    sampler = as_edge_prediction_sampler(NeighborSampler([2]), negative_sampler=Uniform(1))
    ((inputs, pairs, negative, (block,)),) = DataLoader(plain(), [3], sampler, device="meta")
    assert {x.device.type for x in (inputs, pairs, negative, block)} == {"meta"}
    assert pairs.edata["weight"].shape == (1,)
    assert block.srcdata["feat"].shape == (len(inputs), 3)


def test_own_negative_sampler() -> None:
    """As in DGL's user guide: a class that is called with the graph and the ids."""

    class ByDegree:
        def __init__(self, g: Any, k: int) -> None:
            self.weights, self.k = g.in_degrees().float() ** 0.75, k

        def __call__(self, g: Any, eids: Tensor) -> tuple[Tensor, Tensor]:
            source = g.find_edges(eids)[0].repeat_interleave(self.k)
            return source, self.weights.multinomial(len(source), replacement=True)

    g = plain(idtype=torch.int32)
    sampler = as_edge_prediction_sampler(NeighborSampler([2]), negative_sampler=ByDegree(g, 3))
    batch = sampler.sample(g, torch.tensor([4, 9]))
    check_plain(g, torch.tensor([4, 9], dtype=torch.int32), batch, 3)


def test_own_sampler_of_nodes() -> None:
    class Plain(Sampler):
        def sample(self, g: Any, indices: Any, exclude_eids: Any = None) -> Any:
            seen.append((indices, exclude_eids))
            return MultiLayerFullNeighborSampler(1).sample(g, indices, exclude_eids)

    seen: list[Any] = []
    sampler = as_edge_prediction_sampler(Plain(), exclude="self")
    _, pairs, _ = sampler.sample(plain(), torch.tensor([5]))
    assert torch.equal(seen[0][0], pairs.ndata[NID])
    assert seen[0][1].tolist() == [5]
    sampler.sample(typed(), {"knows": [3]})
    assert set(seen[1][0]) == {"user", "item"}
    assert {etype: eids.tolist() for etype, eids in seen[1][1].items()} == {KNOWS: [3]}


def test_no_edges() -> None:
    sampler = EdgePredictionSampler(NeighborSampler([2]), "self", negative_sampler=Uniform(1))
    inputs, pairs, negative, blocks = sampler.sample(plain(), torch.empty(0, dtype=torch.int64))
    assert inputs.numel() == pairs.num_nodes() == negative.num_edges() == blocks[0].num_edges() == 0


def test_errors() -> None:
    sampler = NeighborSampler([2])

    class NoExclusion:
        def sample(self, g: Any, indices: Any) -> None: ...

    with pytest.raises(TypeError, match=r"NoExclusion.sample must take .* third parameter"):
        as_edge_prediction_sampler(NoExclusion())
    edge_sampler = as_edge_prediction_sampler(sampler)
    with pytest.raises(TypeError, match="draws for edges already"):
        EdgeDataLoader(plain(), [0], edge_sampler)
    with pytest.raises(TypeError, match=r"whole in this process or from a DistGraph.*got str"):
        edge_sampler.sample("graph", [0])
    with pytest.raises(TypeError, match="indices must be a dictionary from relation to ids"):
        edge_sampler.sample(typed(), [0])
    with pytest.raises(ValueError, match=r"indices of .* must be in \[0, 120\) \(got -1\)"):
        edge_sampler.sample(plain(), [0, -1])

    def negatives(pairs: Any, g: Any = None) -> None:
        own = as_edge_prediction_sampler(sampler, negative_sampler=lambda g, eids: pairs)
        own.sample(plain() if g is None else g, [0] if g is None else {"buys": [0]})

    with pytest.raises(ValueError, match=r"negative destinations of .* \[0, 20\) \(got 20\)"):
        negatives(([0], [20]))
    with pytest.raises(ValueError, match=r"as many sources as destinations \(got 1 and 2"):
        negatives(([0], [1, 2]))
    with pytest.raises(TypeError, match="must return a dictionary from relation"):
        negatives(([0], [1]), typed())
