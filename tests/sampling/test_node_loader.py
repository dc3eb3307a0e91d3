# SPDX-License-Identifier: Apache-2.0
"""DataLoader over the nodes of a graph: against DGL, repeatable, features. No process group."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import pytest
import torch
from loader_cases import BOTH, block_edges, dgl, plain, typed
from torch import Tensor

import graphshard
from graphshard.dgl.dataloading import (
    BlockSampler,
    DataLoader,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    NodeDataLoader,
    Sampler,
)
from graphshard.graph import EID, NID

IDTYPES = [torch.int32, torch.int64]


def signature(batch: Any) -> list[Any]:
    """A batch as plain lists, edge order included."""
    inputs, outputs, blocks = batch

    def listed(ids: Any) -> Any:
        return {k: v.tolist() for k, v in ids.items()} if isinstance(ids, dict) else ids.tolist()

    return [
        listed(inputs),
        listed(outputs),
        [
            {e: (*(x.tolist() for x in b.edges(etype=e)), b.edges[e].data[EID].tolist())}
            for b in blocks
            for e in b.canonical_etypes
        ],
    ]


def run_quietly(loader: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DGL advises on CPU affinity
        return list(loader)


# ------------------------------------------------------------------ against DGL


@pytest.mark.parametrize("idtype", IDTYPES)
def test_all_neighbours_as_dgl_plain(idtype: torch.dtype) -> None:
    per_module = []
    for module in BOTH:
        kind = torch.int64 if module is dgl else idtype  # its int32 blocks lack some nodes
        sampler = module.dataloading.MultiLayerFullNeighborSampler(2)
        seeds = torch.tensor([3, 19, 0, 7, 11], dtype=kind)
        loader = module.dataloading.DataLoader(plain(module, kind), seeds, sampler, batch_size=2)
        assert len(loader) == 3
        per_module.append(run_quietly(loader))
    for (inputs, outputs, blocks), (dgl_inputs, dgl_outputs, dgl_blocks) in zip(
        *per_module, strict=True
    ):
        assert inputs.dtype == outputs.dtype == idtype
        assert outputs.tolist() == dgl_outputs.tolist()
        assert sorted(inputs.tolist()) == sorted(dgl_inputs.tolist())
        for block, dgl_block in zip(blocks, dgl_blocks, strict=True):
            assert block_edges(block) == block_edges(dgl_block)
            assert torch.equal(block.dstdata[NID], block.srcdata[NID][: block.num_dst_nodes()])
            # features are there unasked, as with DGL
            for name in ("feat", "label"):
                of_node = dict(
                    zip(dgl_block.srcdata[NID].tolist(), dgl_block.srcdata[name], strict=True)
                )
                expected = torch.stack([of_node[i] for i in block.srcdata[NID].tolist()])
                assert torch.equal(block.srcdata[name], expected)
                assert torch.equal(block.dstdata[name], expected[: block.num_dst_nodes()])
            weight = plain().edata["weight"]
            assert torch.equal(block.edata["weight"], weight[block.edata[EID].long()])


@pytest.mark.parametrize("idtype", IDTYPES)
def test_all_neighbours_as_dgl_typed(idtype: torch.dtype) -> None:
    per_module = []
    for module in BOTH:
        kind = torch.int64 if module is dgl else idtype  # its int32 blocks lack some nodes
        indices = {"user": torch.arange(7, dtype=kind), "item": torch.arange(4, dtype=kind)}
        loader = module.dataloading.DataLoader(
            typed(module, kind),
            indices,
            module.dataloading.MultiLayerFullNeighborSampler(2),
            batch_size=4,
        )
        per_module.append(run_quietly(loader))
    for (inputs, outputs, blocks), (dgl_inputs, dgl_outputs, dgl_blocks) in zip(
        *per_module, strict=True
    ):
        assert {t: ids.tolist() for t, ids in outputs.items()} == {
            t: ids.tolist() for t, ids in dgl_outputs.items()
        }
        for ntype in ("user", "item"):
            assert sorted(inputs[ntype].tolist()) == sorted(dgl_inputs[ntype].tolist())
        for block, dgl_block in zip(blocks, dgl_blocks, strict=True):
            assert block_edges(block) == block_edges(dgl_block)
            feat = typed().nodes["item"].data["feat"]
            ids = block.srcnodes["item"].data[NID].long()
            assert torch.equal(block.srcnodes["item"].data["feat"], feat[ids])
            assert set(block.srcdata["feat"]) == {"user", "item"}
            assert set(block.srcdata["label"]) == {"user"}
    assert [sum(map(len, batch[1].values())) for batch in per_module[0]] == [4, 4, 3]


def test_fanouts_as_dgl() -> None:
    """As many edges for each node and relation as DGL draws."""
    fanouts = [{"buys": 2, "bought_by": 0, "knows": 3}, {"buys": 1, "bought_by": 2, "knows": -1}]
    degrees = []
    for module in BOTH:
        g = typed(module)
        sampler = module.dataloading.NeighborSampler(
            [{g.to_canonical_etype(e): k for e, k in layer.items()} for layer in fanouts]
        )
        seeds = {"user": torch.arange(12), "item": torch.arange(9)}
        _, _, blocks = sampler.sample(g, seeds)
        degrees.append(
            [{e: b.in_degrees(etype=e)[:9].tolist() for e in b.canonical_etypes} for b in blocks]
        )
    assert degrees[0] == degrees[1]


# ------------------------------------------------------------------ the same batches again


def samplers() -> list[Any]:
    return [NeighborSampler([3, 2]), NeighborSampler([2], replace=True), LaborSampler([3, 2])]


@pytest.mark.parametrize("sampler", samplers(), ids=["plain", "replace", "labor"])
@pytest.mark.parametrize("make", [plain, typed])
def test_same_batches_for_any_prefetch(make: Any, sampler: Any) -> None:
    g = make()
    indices = torch.arange(20) if make is plain else {"user": range(12), "item": [2, 0, 5]}

    def batches(prefetch: int, seed: int = 5, epoch: int = 0) -> list[Any]:
        loader = DataLoader(
            g, indices, sampler, batch_size=4, shuffle=True, seed=seed, prefetch=prefetch
        )
        loader.set_epoch(epoch)
        return [signature(batch) for batch in loader]

    reference = batches(0)
    assert batches(1) == batches(3) == reference
    assert batches(0, seed=6) != reference
    assert batches(0, epoch=1) != reference


def test_each_iteration_is_another_epoch() -> None:
    loader = DataLoader(plain(), torch.arange(20), NeighborSampler([2]), batch_size=20, seed=1)
    first, second = (signature(next(iter(loader))) for _ in range(2))
    assert first[1] == second[1]  # not shuffled
    assert first != second  # but drawn anew
    assert loader.epoch == 2
    loader.set_epoch(0)
    assert signature(next(iter(loader))) == first


def test_seed_comes_from_torch() -> None:
    def batches() -> list[Any]:
        torch.manual_seed(3)
        loader = DataLoader(plain(), torch.arange(20), NeighborSampler([2]), shuffle=True)
        return [signature(batch) for batch in loader]

    assert batches() == batches()


def test_what_is_drawn_is_a_function_of_the_node() -> None:
    """Not of what else is in the batch; so that ranks which share a batch draw alike."""
    sampler, g = NeighborSampler([2]), plain()
    loaders = [
        DataLoader(g, nodes, sampler, batch_size=20, seed=9) for nodes in ([3, 5, 7], [7, 8])
    ]
    edges = [block_edges(next(iter(loader))[2][0]) for loader in loaders]
    into_seven = [
        [edge for of_relation in found.values() for edge in of_relation if edge[1] == 7]
        for found in edges
    ]
    assert into_seven[0] == into_seven[1] != []


def test_two_iterations_side_by_side() -> None:
    loader = DataLoader(plain(), torch.arange(20), NeighborSampler([2]), batch_size=4, seed=1)
    both = [(signature(a), signature(b)) for a, b in zip(loader, loader, strict=True)]
    loader.set_epoch(0)
    assert [signature(batch) for batch in loader] == [first for first, _ in both]


def test_leaving_early_leaves_no_thread() -> None:
    before = threading.active_count()
    for _ in DataLoader(plain(), torch.arange(20), NeighborSampler([2]), prefetch=2):
        break
    assert threading.active_count() == before


# ------------------------------------------------------------------ features


def gathered(data: Any) -> set[str]:
    """Fields that are tensors already."""
    return {name for name, value in data.frame._columns.items() if isinstance(value, Tensor)} | {
        name
        for name, value in data.frame._columns.items()
        if getattr(value, "_rows", None) is not None
    }


def test_named_features_are_gathered_ahead() -> None:
    sampler = NeighborSampler(
        [3, 2],
        prefetch_node_feats=["feat"],
        prefetch_labels=["label"],
        prefetch_edge_feats=["weight"],
    )
    for _, _, blocks in DataLoader(plain(), torch.arange(20), sampler, batch_size=8):
        first, last = blocks
        assert gathered(first.srcnodes["_N"].data) == {NID, "feat"}
        assert gathered(last.srcnodes["_N"].data) == {NID}
        assert gathered(last.dstnodes["_N"].data) == {NID, "label"}
        assert gathered(first.edges["_E"].data) == gathered(last.edges["_E"].data)
        assert gathered(last.edges["_E"].data) == {EID, "weight"}
        assert torch.equal(last.dstdata["label"], last.dstdata[NID])


def test_named_features_by_type() -> None:
    sampler = NeighborSampler(
        [3],
        prefetch_node_feats={"item": ["feat"]},
        prefetch_labels=["label"],
        prefetch_edge_feats={"buys": ["weight"]},
    )
    for _, _, blocks in DataLoader(typed(), {"user": torch.arange(12)}, sampler, batch_size=8):
        (block,) = blocks
        assert gathered(block.srcnodes["item"].data) == {NID, "feat"}
        assert gathered(block.srcnodes["user"].data) == {NID}
        assert gathered(block.dstnodes["user"].data) == {NID, "label"}
        assert gathered(block.edges["buys"].data) == {EID, "weight"}


@pytest.mark.parametrize("make", [plain, typed])
def test_out_edges(make: Any) -> None:
    g = make()
    sampler = NeighborSampler([-1], edge_dir="out", prefetch_edge_feats=["weight"])
    seeds = torch.arange(20) if make is plain else {"item": torch.arange(9)}
    _, _, (block,) = next(iter(DataLoader(g, seeds, sampler, batch_size=20)))
    name, etype = ("_E", None) if make is plain else ("bought_by", "buys")
    # Under the name of the relation whose edges were followed, turned round.
    (turned,) = [e for e in block.canonical_etypes if e[1] == name]
    eids = block.edges[turned].data[EID]
    far, near = (x.long() for x in block.edges(etype=turned))
    source, target = g.find_edges(eids, etype=name)
    assert torch.equal(block.dstnodes[turned[2]].data[NID][near], source)
    assert torch.equal(block.srcnodes[turned[0]].data[NID][far], target)
    if etype is None:
        assert torch.equal(block.edges[turned].data["weight"], g.edata["weight"][eids])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch_node_feats": ["nope"]}, "prefetch_node_feats names 'nope', which the graph"),
        ({"prefetch_labels": {"user": ["weight"]}}, "names 'weight' of 'user', which the graph"),
        ({"prefetch_edge_feats": {"sells": ["weight"]}}, "names the type 'sells'; the graph has"),
    ],
)
def test_missing_features(options: dict[str, Any], message: str) -> None:
    loader = DataLoader(typed(), {"user": [0]}, NeighborSampler([1], **options))
    with pytest.raises(ValueError, match=message):
        next(iter(loader))


def test_names_must_be_listed() -> None:
    loader = DataLoader(plain(), [0], NeighborSampler([1], prefetch_node_feats="feat"))
    with pytest.raises(TypeError, match=r"must hold lists of names \(got 'feat'\)"):
        next(iter(loader))


def test_features_set_later_are_seen() -> None:
    """Batches have what the graph has when they are drawn; the loader keeps no copy."""
    g = plain()
    loader = DataLoader(g, torch.arange(20), NeighborSampler([2]), batch_size=20)
    g.ndata["late"] = torch.arange(20.0)
    _, _, (block,) = next(iter(loader))
    assert torch.equal(block.srcdata["late"], block.srcdata[NID].float())


def test_sparse_features_come_as_rows_that_are_sparse() -> None:
    g = plain()
    rows = torch.randn(g.num_nodes(), 6).relu()
    g.ndata["sparse"] = rows.to_sparse()
    sampler = NeighborSampler([3], prefetch_node_feats=["sparse"])
    for inputs, _, blocks in DataLoader(g, torch.arange(4), sampler, batch_size=3):
        assert torch.equal(blocks[0].srcdata["sparse"].to_dense(), rows[inputs])


def test_weights_set_later_are_seen() -> None:
    g = plain()
    g.edata["p"] = torch.ones(120)
    loader = DataLoader(g, torch.arange(20), NeighborSampler([-1], prob="p"), batch_size=20)
    assert next(iter(loader))[2][0].num_edges() == 120
    g.edata["p"][:100] = 0  # in place
    assert next(iter(loader))[2][0].num_edges() == 20
    g.edata["p"] = torch.zeros(120)
    assert next(iter(loader))[2][0].num_edges() == 0


def test_device() -> None:
    sampler = NeighborSampler([2], prefetch_node_feats=["feat"])
    for device, of_sampler in (("meta", None), (None, "meta")):
        sampler.output_device = of_sampler
        loader = DataLoader(plain(), [3, 4], sampler, device, batch_size=2)
        ((inputs, _, (block,)),) = loader
        assert inputs.device.type == block.device.type == "meta"
        assert block.srcdata["feat"].device.type == "meta"
        assert block.srcdata["label"].device.type == "meta"


# ------------------------------------------------------------------ a user's own samplers


def test_any_object_with_sample() -> None:
    class Neighbourhood:
        def sample(self, g: Any, indices: Tensor) -> Any:
            threads.add(threading.current_thread().name)
            return {"sub": [graphshard.in_subgraph(g, indices)], "n": len(indices), "i": indices}

    threads: set[str] = set()
    batches = list(DataLoader(plain(), torch.arange(5), Neighbourhood(), batch_size=2))
    assert [batch["n"] for batch in batches] == [2, 2, 1]
    assert batches[1]["i"].tolist() == [2, 3]
    assert batches[1]["sub"][0].num_edges() == int(plain().in_degrees([2, 3]).sum())
    assert threads == {"MainThread"}  # it may share torch's generator with the model
    list(DataLoader(plain(), torch.arange(5), Neighbourhood(), prefetch=1))
    assert len(threads) == 2


def test_own_sampler_is_told_the_draw() -> None:
    class Keyed(Sampler):
        def sample(self, g: Any, indices: Any, draw_seed: Any = None) -> Any:
            return draw_seed

    loader = DataLoader(plain(), torch.arange(4), Keyed(), batch_size=2, seed=7)
    list(loader)
    assert [(d.seed, d.epoch, d.step) for d in loader] == [(7, 1, 0), (7, 1, 1)]


@pytest.mark.parametrize("module", BOTH, ids=["graphshard", "dgl"])
def test_own_block_sampler_as_for_dgl(module: Any) -> None:
    """The example of DGL's user guide: a subclass that makes blocks with to_block."""
    base = BlockSampler if module is BOTH[0] else module.dataloading.BlockSampler

    class AllNeighbours(base):  # type: ignore[misc, valid-type]
        def __init__(self, num_layers: int) -> None:
            super().__init__(prefetch_node_feats=["feat"], prefetch_edge_feats=["weight"])
            self.num_layers = num_layers

        def sample_blocks(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
            output_nodes, blocks = seed_nodes, []
            for _ in range(self.num_layers):
                frontier = module.in_subgraph(g, seed_nodes)
                block = module.to_block(frontier, seed_nodes)
                block.edata[EID] = frontier.edata[EID]
                seed_nodes = block.srcdata[NID]
                blocks.insert(0, block)
            return seed_nodes, output_nodes, blocks

    g = plain(module)
    loader = module.dataloading.DataLoader(g, torch.arange(6), AllNeighbours(2), batch_size=3)
    reference = DataLoader(plain(), range(6), MultiLayerFullNeighborSampler(2), batch_size=3)
    for (inputs, outputs, blocks), (ours_in, ours_out, ours) in zip(
        run_quietly(loader), reference, strict=True
    ):
        assert sorted(inputs.tolist()) == sorted(ours_in.tolist())
        assert torch.equal(outputs, ours_out)
        assert list(map(block_edges, blocks)) == list(map(block_edges, ours))
        assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][inputs])
        assert torch.equal(blocks[1].edata["weight"], g.edata["weight"][blocks[1].edata[EID]])


# ------------------------------------------------------------------ graphs and what is kept


def test_graphs_made_of_a_sampled_one_are_sampled_as_they_are() -> None:
    g = plain()
    sampler = NeighborSampler([-1])

    def num_edges(graph: Any) -> int:
        return sampler.sample(graph, torch.arange(20))[2][0].num_edges()

    assert num_edges(g) == 120
    for other in (g.int(), g.local_var(), copy.deepcopy(g), copy.copy(g)):
        _, _, (block,) = sampler.sample(other, [3])
        assert block.idtype == other.idtype
        assert num_edges(other) == 120
    assert num_edges(graphshard.add_self_loop(g)) == 140
    assert num_edges(graphshard.edge_subgraph(g, range(10), relabel_nodes=False)) == 10


def test_one_graph_in_two_threads() -> None:
    """Scratch space is per thread."""
    g = plain()
    loaders = [
        DataLoader(g, torch.arange(20), NeighborSampler([3, 3]), batch_size=1, seed=s, shuffle=True)
        for s in range(3)
    ]
    alone = [[signature(batch) for batch in loader] for loader in loaders]
    for loader in loaders:
        loader.set_epoch(0)
    together = [tuple(map(signature, batches)) for batches in zip(*loaders, strict=True)]
    assert [list(of_loader) for of_loader in zip(*together, strict=True)] == alone


# ------------------------------------------------------------------ arguments


def test_older_name() -> None:
    loader = NodeDataLoader(
        plain(), torch.arange(6), NeighborSampler([2]), batch_size=4, num_workers=4, seed=2
    )
    assert [len(outputs) for _, outputs, _ in loader] == [4, 2]


def test_empty() -> None:
    assert list(DataLoader(plain(), [], NeighborSampler([2]))) == []
    g = graphshard.graph(([], []), num_nodes=3)
    ((inputs, outputs, (block,)),) = DataLoader(g, [0, 2], NeighborSampler([2]), batch_size=2)
    assert inputs.tolist() == outputs.tolist() == [0, 2]
    assert block.num_edges() == 0


def test_options_of_dgl_scripts() -> None:
    loader = DataLoader(
        plain(),
        torch.arange(4),
        NeighborSampler([2]),
        num_workers=2,
        persistent_workers=True,
        use_prefetch_thread=False,
        pin_prefetcher=False,
        use_alternate_streams=False,
        use_uva=False,
        gpu_cache=None,
    )
    assert loader.prefetch == 0
    with loader.enable_cpu_affinity():
        assert len(list(loader)) == 4


def test_errors() -> None:
    g, sampler = plain(), NeighborSampler([2])
    with pytest.raises(TypeError, match=r"no option 'batchsize'"):
        DataLoader(g, [0], sampler, batchsize=2)
    with pytest.raises(ValueError, match="use_uva=True is for batches on a GPU of a graph on the"):
        DataLoader(g, [0], sampler, "cpu", use_uva=True)
    with pytest.raises(ValueError, match=r"device must be one that torch has here \(got 'cuda:99'"):
        DataLoader(g, [0], sampler, "cuda:99")
    with pytest.raises(ValueError, match=r"makes no batch ahead \(got prefetch=2\)"):
        DataLoader(g, [0], sampler, prefetch=2, use_prefetch_thread=False)
    with pytest.raises(NotImplementedError, match="gpu_cache is not offered"):
        DataLoader(g, [0], sampler, gpu_cache={"node": {"feat": 10}})
    with pytest.raises(TypeError, match=r"must have a method sample\(g, indices\) \(got int\)"):
        DataLoader(g, [0], 3)
    with pytest.raises(ValueError, match=r"prefetch must be 0 or more batches \(got -1\)"):
        DataLoader(g, [0], sampler, prefetch=-1)
    with pytest.raises(ValueError, match=r"must be in \[0, 20\) \(got 20\)"):
        list(DataLoader(g, [0, 20], sampler))


def test_error_in_a_sampler_keeps_its_place() -> None:
    class Fails(Sampler):
        def sample(self, g: Any, indices: Any, draw_seed: Any = None) -> Any:
            if draw_seed.step == 2:
                raise RuntimeError("no luck")
            return draw_seed.step

    seen = []
    with pytest.raises(RuntimeError, match="no luck"):
        for step in DataLoader(plain(), torch.arange(5), Fails()):
            seen.append(step)
    assert seen == [0, 1]


def test_dgl_is_the_oracle() -> None:
    assert dgl.__version__.startswith("1.1")
