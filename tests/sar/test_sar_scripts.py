# SPDX-License-Identifier: Apache-2.0
"""Programs of SAR's users, with nothing but imports changed, against DGL on the whole graph.

Losses of every step, and what was computed for nodes, must be those of one process. 2 ranks; with
``--all`` 1, 2 and 5, of which some then have nothing to train on.
"""

from __future__ import annotations

import socket
import warnings
from typing import Any

import pytest
import sar_scripts
import torch
import torch.nn.functional as F
from sar_scripts import EPOCHS, HIDDEN
from torch import Tensor, nn

import graphshard
from dgl_peer import dgl
from graphshard.testing import run_ranks

NUM_AUTHORS, NUM_PAPERS, NUM_NODES, CLASSES = 12, 20, 40, 3
RELATIONS = {
    ("author", "writes", "paper"): (NUM_AUTHORS, NUM_PAPERS, 50),
    ("paper", "cites", "paper"): (NUM_PAPERS, NUM_PAPERS, 60),
    ("paper", "written", "author"): (NUM_PAPERS, NUM_AUTHORS, 50),
}


def random_plain(of: Any) -> Any:
    draw = torch.Generator().manual_seed(0)
    ends = torch.randint(0, NUM_NODES, (2, 90), generator=draw)
    graph = of.graph((ends[0], ends[1]), num_nodes=NUM_NODES)
    graph.ndata["feat"] = torch.randn(NUM_NODES, 5, dtype=torch.float64, generator=draw)
    graph.ndata["label"] = torch.randint(0, CLASSES, (NUM_NODES, 1), generator=draw)
    graph.ndata["label"][0] = CLASSES - 1
    return graph


def random_typed(of: Any) -> Any:
    draw = torch.Generator().manual_seed(1)
    edges = {
        etype: (
            torch.randint(0, sources, (count,), generator=draw),
            torch.randint(0, targets, (count,), generator=draw),
        )
        for etype, (sources, targets, count) in RELATIONS.items()
    }
    graph = of.heterograph(edges, {"author": NUM_AUTHORS, "paper": NUM_PAPERS})
    papers = graph.nodes["paper"].data
    papers["features"] = torch.randn(NUM_PAPERS, 5, dtype=torch.float64, generator=draw)
    papers["labels"] = torch.arange(NUM_PAPERS) % CLASSES
    papers["train_mask"] = torch.arange(NUM_PAPERS) % 2 == 0
    return graph


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, run_all: bool) -> dict[int, str]:
    """Number of ranks to the folder with the partitions for them."""
    folders = {}
    for num_ranks in (1, 2, 5) if run_all else (2,):
        folder = tmp_path_factory.mktemp(f"parts{num_ranks}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", graphshard.partition.BalanceWarning)
            sar_scripts.partition_graph(str(folder), "plain", random_plain(graphshard), num_ranks)
            graphshard.partition.partition_graph(
                random_typed(graphshard),
                "typed",
                num_ranks,
                folder / "typed",
                part_method="random",
                quiet=True,
            )
        folders[num_ranks] = str(folder)
    return folders


def run(program: Any, parts: dict[int, str], *args: object) -> list[list[Any]]:
    """For each number of ranks, what they returned."""
    found = []
    for num_ranks, folder in parts.items():
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        found.append(run_ranks(program, num_ranks, folder, port, *args, group=False))
    return found


def prepared() -> tuple[Any, Tensor, Tensor, list[Tensor]]:
    """What ``partition_graph`` should have made, by DGL: graph, features, labels, masks."""
    graph = dgl.remove_self_loop(random_plain(dgl))
    graph = dgl.add_self_loop(dgl.to_bidirected(graph, copy_ndata=True))
    thirds = [torch.arange(third, NUM_NODES, 3) for third in range(3)]
    return graph, graph.ndata["feat"], graph.ndata["label"].view(-1), thirds


def flow(graph: Any, seeds: Tensor, num_layers: int) -> tuple[list[Any], Tensor]:
    """Message flow graphs of DGL, and the nodes that they take."""
    blocks: list[Any] = []
    for _ in range(num_layers):
        block = dgl.to_block(dgl.in_subgraph(graph, seeds), seeds)
        blocks.insert(0, block)
        seeds = block.srcdata[dgl.NID]
    return blocks, seeds


def losses_of(model: nn.Module, first: dict[str, Tensor], forward: Any, decay: float = 0) -> Any:
    """Losses of training from the given parameters on the whole graph."""
    model = model.double()
    model.load_state_dict(first)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=decay)
    losses = []
    for _ in range(EPOCHS):
        logits, labels = forward(model)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_basic(parts: dict[int, str]) -> None:
    graph, features, labels, thirds = prepared()
    for ranks in run(sar_scripts.basic, parts):
        model = sar_scripts.GNNModel(dgl, "sage", [5, HIDDEN, CLASSES])

        def forward(model: nn.Module) -> tuple[Tensor, Tensor]:
            return model(graph, features)[thirds[0]], labels[thirds[0]]

        expected = losses_of(model, ranks[0]["first"], forward)
        for found in ranks:
            assert found["losses"] == pytest.approx(expected, rel=1e-10)
            assert found["accuracies"][1::2].tolist() == [len(third) for third in thirds]


@pytest.mark.parametrize("kind", ["gcn", "sage", "gat"])
def test_advanced_in_every_mode(parts: dict[int, str], kind: str) -> None:
    graph, features, labels, thirds = prepared()
    blocks, inputs = flow(graph, thirds[0], 2)

    def forward(model: nn.Module) -> tuple[Tensor, Tensor]:
        return model(graph, features)[thirds[0]], labels[thirds[0]]

    def forward_blocks(model: nn.Module) -> tuple[Tensor, Tensor]:
        return model(blocks, features[inputs]), labels[thirds[0]]

    for ranks in run(sar_scripts.advanced, parts, [kind]):
        assert len(ranks[0]) == 6
        for _, mode, mfgs, found in ranks[0]:
            model = sar_scripts.GNNModel(dgl, kind, [5, HIDDEN, CLASSES])
            # GraphConv divides by out-degrees, which a message flow graph has of its own.
            expected = losses_of(model, found["first"], forward_blocks if mfgs else forward)
            assert found["losses"] == pytest.approx(expected, rel=1e-10), (mode, mfgs)
            with torch.no_grad():
                is_right = model(graph, features).argmax(1) == labels
            right = [int(is_right[third].sum()) for third in thirds]
            assert found["correct"].tolist() == right, (mode, mfgs)


@pytest.mark.parametrize("named", [False, True])
def test_heterogeneous(parts: dict[int, str], named: bool) -> None:
    typed = random_typed(graphshard)
    start = {"author": 0, "paper": NUM_AUTHORS}
    ends, numbers = [], []
    for number, etype in enumerate(typed.canonical_etypes):
        src, dst = typed.edges(etype=etype)
        ends.append(torch.stack([src + start[etype[0]], dst + start[etype[2]]]))
        numbers.append(torch.full((len(src),), number))
    src, dst = torch.cat(ends, 1)
    graph = dgl.graph((src, dst), num_nodes=NUM_AUTHORS + NUM_PAPERS)
    papers = typed.nodes["paper"].data
    features = torch.cat([torch.zeros(NUM_AUTHORS, 5, dtype=torch.float64), papers["features"]])
    train = papers["train_mask"].nonzero().view(-1)

    def forward(model: nn.Module) -> tuple[Tensor, Tensor]:
        logits = model(graph, features, torch.cat(numbers))
        return logits[train + NUM_AUTHORS], papers["labels"][train]

    for ranks in run(sar_scripts.heterogeneous, parts, named):
        model = sar_scripts.RelationalModel(
            dgl.nn.RelGraphConv, [5, HIDDEN, CLASSES], len(RELATIONS)
        )
        expected = losses_of(model, ranks[0]["first"], forward)
        for found in ranks:
            assert found["losses"] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("mfgs", [False, True])
def test_types_kept_apart(parts: dict[int, str], mfgs: bool) -> None:
    graph = random_typed(dgl)
    papers = graph.nodes["paper"].data
    train = papers["train_mask"].nonzero().view(-1)
    for ranks in run(sar_scripts.typed, parts, mfgs):
        first = ranks[0]["first"]
        # The table of a rank is of new ids; that of the whole graph is of those before.
        rows = torch.cat([found["authors"] for found in ranks])
        first["table.embeds.author.weight"][rows] = first["table.embeds.author.weight"].clone()
        table = dgl.nn.HeteroEmbedding({"author": NUM_AUTHORS}, 5)
        model = sar_scripts.TypedModel(dgl, graph, 5, CLASSES)
        both = nn.ModuleDict({"model": model, "table": table})

        def forward(both: Any) -> tuple[Tensor, Tensor]:
            h = {"author": both["table"].weight["author"], "paper": papers["features"]}
            return both["model"](graph, h)["paper"][train], papers["labels"][train]

        expected = losses_of(both, first, forward)
        for found in ranks:
            assert found["losses"] == pytest.approx(expected, rel=1e-10)


def test_sampling(parts: dict[int, str]) -> None:
    for ranks in run(sar_scripts.sampling, parts):
        assert all(found["losses"] == ranks[0]["losses"] for found in ranks)
        assert len(ranks[0]["losses"]) >= EPOCHS


def test_appnp(parts: dict[int, str]) -> None:
    graph, features, labels, thirds = prepared()

    def forward(model: nn.Module) -> tuple[Tensor, Tensor]:
        torch.set_default_dtype(torch.float64)  # of weights that DGL makes by itself
        try:
            return model(features)[thirds[0]], labels[thirds[0]]
        finally:
            torch.set_default_dtype(torch.float32)

    for ranks in run(sar_scripts.appnp, parts):
        model = sar_scripts.APPNP(dgl, graph, [5, HIDDEN, CLASSES])
        expected = losses_of(model, ranks[0]["first"], forward, decay=5e-4)
        assert ranks[0]["losses"] == pytest.approx(expected, rel=1e-10)


def whole(ranks: list[Any], rows: list[Tensor]) -> Tensor:
    """Rows of all ranks, in the order of the ids before partitioning."""
    found = torch.cat(rows)
    out = torch.empty_like(found)
    out[torch.cat([one["nodes"] for one in ranks])] = found
    return out


def test_sign(parts: dict[int, str]) -> None:
    graph, features, _, _ = prepared()
    expected = sar_scripts.averaged(dgl, graph, features, 2)
    for ranks in run(sar_scripts.sign, parts):
        for hop, want in enumerate(expected):
            torch.testing.assert_close(whole(ranks, [one["feats"][hop] for one in ranks]), want)
        for one in ranks:
            for name, value in one["params"].items():
                assert torch.equal(value, ranks[0]["params"][name])


def test_correct_and_smooth(parts: dict[int, str]) -> None:
    graph, features, labels, thirds = prepared()
    for ranks in run(sar_scripts.correct_and_smooth, parts):
        normal = (features - features.mean(0)) / features.std(0, unbiased=False)
        torch.testing.assert_close(whole(ranks, [one["features"] for one in ranks]), normal)
        y_soft = whole(ranks, [one["y_soft"] for one in ranks])
        expected = sar_scripts.smoothed(dgl, graph, y_soft, labels, thirds[0])
        torch.testing.assert_close(whole(ranks, [one["out"] for one in ranks]), expected)
