# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a cluster: saved and loaded by other trainers, on other hosts and other parts.

Rows are functions of original ids, so that each can be told wherever it is. Servers run in threads
of the test, trainers are processes, or the test itself.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import graphshard
from graphshard.comm import barrier
from graphshard.data import random_graph
from graphshard.distributed import (
    DistEmbedding,
    DistGraph,
    DistTensor,
    GraphServer,
    SparseAdagrad,
    SparseAdam,
    SparseSGD,
    exit_client,
    initialize,
    load_checkpoint,
    partition_graph,
    save_checkpoint,
)
from graphshard.distributed.saving import _save
from graphshard.errors import CheckpointError
from graphshard.testing import RanksFailed, run_ranks
from graphshard.train.checkpoints import digest_of_content

TOKEN = "a token that is for tests alone"
NUM_NODES, WIDTH = 90, 3


def plain() -> Any:
    graph = random_graph(num_nodes=NUM_NODES, num_edges=500, seed=1)
    graph.ndata["feat"] = torch.arange(NUM_NODES * 2.0).view(-1, 2)
    graph.ndata["unchanged"] = torch.ones(NUM_NODES)
    return graph


def typed() -> Any:
    ids = torch.Generator().manual_seed(0)
    sizes = {"user": 40, "item": 70}
    edges = {}
    for src, relation, dst, count in (
        ("user", "rates", "item", 200),
        ("item", "rated", "user", 150),
        ("user", "knows", "user", 0),
    ):
        edges[src, relation, dst] = tuple(
            torch.randint(0, sizes[t], (count,), generator=ids) for t in (src, dst)
        )
    graph: Any = graphshard.heterograph(edges, sizes)
    graph.nodes["item"].data["feat"] = torch.arange(140.0).view(-1, 2)
    return graph


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """JSONs by kind and number of parts; the 5 parts have another order, and one is empty."""
    folder = tmp_path_factory.mktemp("parts")
    found = {}
    for kind, make in (("plain", plain), ("typed", typed)):
        graph = make()
        for num_parts in (2, 5):
            owner: Any = "random"
            if num_parts == 5:
                owner = {
                    t: torch.tensor([0, 3, 1, 4])[torch.randint(0, 4, (graph.num_nodes(t),))]
                    for t in graph.ntypes
                }
                owner = owner if kind == "typed" else owner["_N"]
            path = folder / f"{kind}-{num_parts}"
            partition_graph(graph, "g", num_parts, path, part_method=owner, quiet=True)
            found[f"{kind} {num_parts}"] = str(path / "g.json")
    other = random_graph(num_nodes=NUM_NODES, num_edges=500, seed=2)
    partition_graph(other, "g", 2, folder / "other", part_method="random", quiet=True)
    found["other"] = str(folder / "other" / "g.json")
    return found


@pytest.fixture(autouse=True)
def _leave(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("GRAPHSHARD_HOST", raising=False)
    exit_client()
    yield
    exit_client()


class Hosts:
    """Servers of a partition, for the time of a test, and the file that lists them."""

    def __init__(
        self, stack: ExitStack, part_config: str, num_hosts: int, folder: Path, **options: Any
    ) -> None:
        self.servers = [
            GraphServer(host, num_hosts, part_config, TOKEN, **options) for host in range(num_hosts)
        ]
        for server in self.servers:
            stack.callback(server.stop)
        stack.callback(exit_client)
        self.path = folder / f"hosts-{len(os.listdir(folder))}"
        self.path.write_text("".join(s.address.replace(":", " ") + "\n" for s in self.servers))


def opened(rank: int, world_size: int, where: str, num_hosts: int) -> DistGraph:
    """The graph, on servers that a file lists, or alone from a partition's JSON."""
    exit_client()
    if num_hosts == 0:
        os.environ.pop("GRAPHSHARD_HOST", None)
        return DistGraph("g", part_config=where)
    host = rank * num_hosts // world_size
    os.environ |= {"GRAPHSHARD_HOST": str(host), "GRAPHSHARD_TOKEN": TOKEN}
    initialize(where)
    return DistGraph("g")


def closed() -> None:
    barrier()
    exit_client()


def original(g: DistGraph, policy: Any) -> Tensor:
    if policy.is_node:
        return g.nodes[policy.type_name].data["orig_id"][:]
    return g.edges[policy.type_name].data["orig_id"][:]


def tensors(g: DistGraph) -> list[tuple[DistTensor, Callable[[Tensor], Tensor]]]:
    """Tensors of many kinds, with what their rows are by original id."""
    node = g.get_node_partition_policy(g.ntypes[0])
    edge = g.get_edge_partition_policy(g.canonical_etypes[0])
    empty = g.get_edge_partition_policy(g.canonical_etypes[-1])

    def make(name: str, shape: tuple[int, ...], dtype: torch.dtype, policy: Any) -> DistTensor:
        shape = (policy.get_size(), *shape)
        return DistTensor(shape, dtype, name, part_policy=policy, persistent=True)

    return [
        (
            make("half", (2, 3), torch.bfloat16, node),
            lambda ids: (ids.view(-1, 1, 1) + torch.arange(6.0).view(2, 3)).bfloat16(),
        ),
        (make("mask", (), torch.bool, node), lambda ids: ids % 3 == 0),
        (make("none", (0,), torch.float64, node), lambda ids: torch.zeros(len(ids), 0).double()),
        (make("count", (), torch.int64, edge), lambda ids: ids * 7),
        (make("far", (1,), torch.int16, empty), lambda ids: (ids % 999).short().view(-1, 1)),
    ]


def feature(g: DistGraph) -> DistTensor:
    return g.nodes["item" if "item" in g.ntypes else "_N"].data["feat"]


def model_of(seed: int) -> tuple[Any, Any]:
    """A model and its optimizer, after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * seed)
    model(torch.randn(5, 3)).pow(2).sum().backward()
    optimizer.step()
    return model, optimizer


EXTRA = {"epoch": 3, "best": (0.5, float("inf")), "state": torch.arange(4), 7: [None, True, "x"]}


def save(rank: int, world_size: int, where: str, num_hosts: int, folder: str) -> None:
    g = opened(rank, world_size, where, num_hosts)
    for tensor, rows_of in tensors(g):
        ids = original(g, _policy(g, tensor))
        tensor[rank::world_size] = rows_of(ids)[rank::world_size]
    if rank == 0:
        feature(g)[1:3] = -feature(g)[1:3]
    model, optimizer = model_of(1)
    path = save_checkpoint(folder, 4, model=model, optimizer={"adam": optimizer}, extra=EXTRA)
    assert path == Path(folder) / "step-00000004"
    closed()


def _policy(g: DistGraph, tensor: DistTensor) -> Any:
    policies = [g.get_node_partition_policy(t) for t in g.ntypes]
    policies += [g.get_edge_partition_policy(t) for t in g.canonical_etypes]
    return next(p for p in policies if p.policy_str == tensor.part_policy)


def load(rank: int, world_size: int, where: str, num_hosts: int, folder: str) -> list[str]:
    g = opened(rank, world_size, where, num_hosts)
    before = feature(g)[:]
    model, optimizer = model_of(2)
    found = load_checkpoint(folder, model=model, optimizer={"adam": optimizer})
    expected_model, expected_optimizer = model_of(1)
    assert str(model.state_dict()) == str(expected_model.state_dict())
    assert str(optimizer.state_dict()) == str(expected_optimizer.state_dict())
    assert (found.step, str(found.extra)) == (4, str(EXTRA))
    check_rows(g)
    changed = (feature(g)[:] != before).any(1)
    assert int(changed.sum()) == 2
    assert torch.equal(feature(g)[:][changed], -before[changed])
    closed()
    return list(found.tensors)


def check_rows(g: DistGraph) -> None:
    for tensor, rows_of in tensors(g):
        expected = rows_of(original(g, _policy(g, tensor)))
        assert torch.equal(tensor[:], expected), tensor


@pytest.mark.parametrize("kind", ["plain", "typed"])
@pytest.mark.parametrize(
    ("saved", "loaded"),  # number of parts, hosts and trainers; without hosts it is one process
    [((2, 0, 1), (5, 3, 2)), ((5, 3, 3), (2, 0, 1)), ((5, 2, 2), (5, 5, 5))],
)
def test_rows_go_by_original_id(
    kind: str,
    saved: tuple[int, int, int],
    loaded: tuple[int, int, int],
    parts: dict[str, str],
    tmp_path: Path,
    run_all: bool,
) -> None:
    if loaded[2] == 5 and not (run_all or kind == "typed"):
        pytest.skip("one of two kinds of graphs; --all has both")
    for function, (num_parts, num_hosts, world_size) in ((save, saved), (load, loaded)):
        where = parts[f"{kind} {num_parts}"]
        with ExitStack() as stack:
            if num_hosts:
                where = str(Hosts(stack, where, num_hosts, tmp_path).path)
            names = run_ranks(function, world_size, where, num_hosts, str(tmp_path / "c"))[0]
    assert len(names) == 6
    assert not any("unchanged" in name or "orig_id" in name for name in names)


# ---------------------------------------------------------------------------- training

KINDS: dict[str, tuple[Any, Any]] = {
    "sgd": (lambda e: SparseSGD([e], 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "adagrad": (
        lambda e: SparseAdagrad([e], 0.1, lr_decay=0.1),
        lambda p: torch.optim.Adagrad(p, 0.1, 0.1),
    ),
    "adam": (lambda e: SparseAdam([e], 0.01), lambda p: torch.optim.SparseAdam(p, 0.01)),
}
STEPS = 4


def batch(step: int) -> Tensor:
    return torch.randint(0, NUM_NODES, (25,), generator=torch.Generator().manual_seed(step))


def first() -> Tensor:
    return torch.randn(NUM_NODES, WIDTH, generator=torch.Generator().manual_seed(9))


def trained_in_one_process(kind: str, num_steps: int) -> Tensor:
    embedding = torch.nn.Embedding(NUM_NODES, WIDTH, sparse=True, _weight=first())
    optimizer = KINDS[kind][1](embedding.parameters())
    for step in range(num_steps):
        optimizer.zero_grad()
        (embedding(batch(step)) ** 3).sum().backward()
        optimizer.step()
    return embedding.weight.detach()


def train(
    rank: int, world_size: int, where: str, num_hosts: int, folder: str, start: int, end: str
) -> Tensor:
    """Steps from ``start`` on; rows by original id afterwards. Saves, or dies, at the end."""
    g = opened(rank, world_size, where, num_hosts)
    ids = g.ndata["orig_id"][:]
    new = torch.empty_like(ids).index_copy_(0, ids, torch.arange(NUM_NODES))
    made = []
    for kind, (make, _) in KINDS.items():
        embedding = DistEmbedding(NUM_NODES, WIDTH, kind, persistent=end == "die" or start > 0)
        if rank == 0 and start == 0:
            embedding.weight[new] = first()
        made.append((embedding, make(embedding)))
    optimizers = [optimizer for _, optimizer in made]
    if folder and start:
        for optimizer in optimizers:
            optimizer.lr = 7.0
        assert load_checkpoint(folder, sparse_optimizers=optimizers).extra == "x"
    for step in range(start, start + STEPS):
        for embedding, optimizer in made:
            (embedding(new[batch(step)[rank::world_size]]) ** 3).sum().backward()
            optimizer.step()
    if end == "save":
        save_checkpoint(folder, start + STEPS, sparse_optimizers=optimizers, extra="x")
    if end == "die":
        barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    found = torch.stack([embedding.weight[new] for embedding, _ in made])
    closed()
    return found


def check_training(found: list[Tensor]) -> None:
    expected = torch.stack([trained_in_one_process(kind, 2 * STEPS) for kind in KINDS])
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_training_goes_on_elsewhere_as_without_interruption(
    parts: dict[str, str], tmp_path: Path
) -> None:
    folder = str(tmp_path / "c")
    with ExitStack() as stack:
        hosts = Hosts(stack, parts["plain 2"], 1, tmp_path)
        run_ranks(train, 2, str(hosts.path), 1, folder, 0, "save")
    with ExitStack() as stack:
        hosts = Hosts(stack, parts["plain 5"], 3, tmp_path)
        check_training(run_ranks(train, 3, str(hosts.path), 3, folder, STEPS, ""))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_job_that_was_killed_finds_rows_and_steps_on_living_servers(
    parts: dict[str, str], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        hosts = Hosts(stack, parts["plain 5"], 2, tmp_path)
        with pytest.raises(RanksFailed, match="SIGKILL"):
            run_ranks(train, 2, str(hosts.path), 2, "", 0, "die")
        check_training(run_ranks(train, 1, str(hosts.path), 2, "", STEPS, ""))


# ---------------------------------------------------------------------------- servers


def test_a_server_that_is_started_again_serves_what_was_saved(
    parts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "c"
    save(0, 1, parts["plain 2"], 0, str(folder))
    DistGraph("g", part_config=parts["plain 2"])
    exit_client()
    monkeypatch.setenv("GRAPHSHARD_TOKEN", TOKEN)
    monkeypatch.setenv("GRAPHSHARD_HOST", "0")
    with ExitStack() as stack:
        hosts = Hosts(stack, parts["plain 5"], 3, tmp_path, restore=folder)
        for server in hosts.servers:
            assert server.restored is not None
            assert (server.restored.step, server.restored.num_tensors) == (4, 6)
        initialize(hosts.path)
        g = DistGraph("g")
        check_rows(g)
        ids = g.ndata["orig_id"][:]
        assert int((feature(g)[:] != torch.arange(180.0).view(-1, 2)[ids]).any(1).sum()) == 2
        save_checkpoint(folder, 5)  # of what was restored
        exit_client()
        lone = GraphServer(2, 3, parts["plain 5"], TOKEN)
        stack.callback(lone.stop)
        lines = hosts.path.read_text().splitlines()
        hosts.path.write_text("\n".join([*lines[:2], lone.address.replace(":", " ")]) + "\n")
        with pytest.warns(RuntimeWarning, match=r"host 1: step 4, host 2: step none\); call load"):
            initialize(hosts.path)


def test_the_command_says_what_it_restores(parts: dict[str, str], tmp_path: Path) -> None:
    g = opened(0, 1, parts["plain 2"], 0)
    DistTensor((NUM_NODES,), torch.float32, "x", persistent=True)
    save_checkpoint(tmp_path / "c", 12)
    del g
    exit_client()
    (tmp_path / "hosts").write_text("127.0.0.1 1\n")
    text = serve_lines(parts["plain 5"], tmp_path, tmp_path / "c")
    assert text == f"host 0 of 1 restored 1 tensors of step 12 from {tmp_path}/c/step-00000012"


def serve_lines(part_config: str, folder: Path, restore: Path) -> str:
    """What the command prints first."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (folder / "hosts").write_text(f"127.0.0.1 {free.getsockname()[1]}\n")
    command = [sys.executable, "-m", "graphshard", "serve", part_config, "--host", "0"]
    command += ["--ip-config", str(folder / "hosts"), "--restore", str(restore)]
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GRAPHSHARD_TOKEN": TOKEN},
    )
    try:
        assert server.stdout is not None
        return server.stdout.readline().strip()
    finally:
        server.kill()
        server.communicate(timeout=30)


def test_a_server_may_find_nothing_or_what_it_cannot_use(
    parts: dict[str, str], tmp_path: Path
) -> None:
    server = GraphServer(0, 2, parts["plain 2"], TOKEN, restore=tmp_path / "c")
    assert server.restored is None
    server.stop()
    saved(parts, tmp_path / "c")
    exit_client()
    with pytest.raises(CheckpointError, match="of another graph"):
        GraphServer(0, 2, parts["other"], TOKEN, restore=tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"of another graph: .* here"):
        GraphServer(0, 2, parts["typed 2"], TOKEN, restore=tmp_path / "c")
    flip(tmp_path / "c" / "step-00000001" / "rank-0.safetensors")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole: .* damaged"):
        GraphServer(0, 2, parts["plain 2"], TOKEN, restore=tmp_path / "c")


# ---------------------------------------------------------------------------- what is wrong


def saved(parts: dict[str, str], folder: Path, step: int = 1) -> tuple[DistGraph, DistTensor]:
    """A graph alone, with a tensor of ones that is saved, and of twos now."""
    if not graphshard.store.has_job():
        opened(0, 1, parts["plain 2"], 0)
    g = DistGraph("g")
    tensor = DistTensor((NUM_NODES, 2), torch.float32, "x", persistent=True)
    tensor[:] = torch.full((NUM_NODES, 2), float(step))
    model, optimizer = model_of(1)
    save_checkpoint(folder, step, model=model, optimizer=optimizer)
    tensor[:] = torch.full((NUM_NODES, 2), -1.0)
    return g, tensor


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 4
    path.write_bytes(content)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and give it the digest that it then has."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    content["blake2b"] = digest_of_content(content)
    path.write_text(json.dumps(content))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of rows": (lambda f: flip(f / "rank-0.safetensors"), "its digest is not"),
    "a bit of a state": (lambda f: flip(f / "shared.safetensors"), "its digest is not"),
    "a byte of the manifest": (lambda f: flip(f / "manifest.json"), "manifest.json is .* damaged"),
    "cut": (lambda f: os.truncate(f / "rank-0.safetensors", 900), "damaged"),
    "no rows": (lambda f: (f / "rank-0.safetensors").unlink(), "missing or damaged"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "missing or damaged"),
    "another folder": (lambda f: f.rename(f.with_name("step-00000077")), "its folder is"),
    "another version": (
        lambda f: rewrite(f, lambda c: c.update(format_version=99)),
        r"has the format \('graphshard-cluster-checkpoint', 99\)",
    ),
    "a tensor more": (
        lambda f: rewrite(f, lambda c: c["tables"].append({**c["tables"][0], "name": "y"})),
        "has no rows 'row/y'",
    ),
    "a wrong dtype": (
        lambda f: rewrite(f, lambda c: c["tables"][0].update(dtype="int32")),
        "has no rows 'row/node~_N~x', or others",
    ),
    "no tables": (lambda f: rewrite(f, lambda c: c.update(tables=3)), "tables must be a list"),
    "a wrong state": (
        lambda f: rewrite(f, lambda c: c["state"].update(model={"tensor": "nowhere"})),
        "which is no value",
    ),
}


@pytest.mark.parametrize("case", list(DAMAGE))
def test_damage_is_an_error_that_changes_nothing(
    case: str, parts: dict[str, str], tmp_path: Path
) -> None:
    _, tensor = saved(parts, tmp_path / "c")
    model, _ = model_of(3)
    before = str(model.state_dict())
    damage, error = DAMAGE[case]
    damage(tmp_path / "c" / "step-00000001")
    with pytest.raises(CheckpointError, match=error):
        load_checkpoint(tmp_path / "c", model=model)
    assert (tensor[:] == -1).all()
    assert str(model.state_dict()) == before


def test_a_damaged_one_gives_way_to_the_one_before(parts: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "c"
    saved(parts, folder, 1)
    saved(parts, folder, 2)
    _, tensor = saved(parts, folder, 3)
    assert sorted(p.name for p in folder.glob("step*")) == ["step-00000002", "step-00000003"]
    flip(folder / "step-00000003" / "rank-0.safetensors")
    with pytest.warns(RuntimeWarning, match="damaged: .*; trying the one before"):
        assert load_checkpoint(folder).step == 2
    assert (tensor[:] == 2).all()
    with pytest.raises(CheckpointError, match="is whole: .*step-00000003"):
        load_checkpoint(folder, step=3)
    saved(parts, folder, 3)  # in place of the damaged one
    assert load_checkpoint(folder).step == 3
    assert (tensor[:] == 3).all()
    with pytest.raises(CheckpointError, match=r"step must be above .* \(got 2, there is step-0"):
        save_checkpoint(folder, 2)


def test_what_does_not_fit_is_an_error_that_changes_nothing(
    parts: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    _, tensor = saved(parts, folder)
    model, optimizer = model_of(3)

    def refused(error: str, **arguments: Any) -> None:
        with pytest.raises(ValueError, match=error):
            load_checkpoint(folder, **arguments)
        assert (tensor[:] == -1).all()

    refused("there is no checkpoint of step 5 in .*are: step-00000001", step=5)
    refused("only model has .'bias', 'weight'", model=torch.nn.Linear(3, 4))
    wide = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    refused(r"'0.weight' of model is \(5, 3\), and that of its state \(4, 3\)", model=wide)
    refused(
        r"optimizer has groups of \[1\] parameters, and its state those of \[4\]",
        model=model,
        optimizer=torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]),
    )
    refused("only model has .'two'", model={"two": model})
    embedding = DistEmbedding(NUM_NODES, 2, "e")
    sparse = SparseAdam([embedding], 0.1)
    refused("lacks the tensors .'node~_N~e', 'node~_N~e.adam_mean'")
    refused("has 0 sparse_optimizers .got 1", sparse_optimizers=[sparse], strict=False)
    save_checkpoint(folder, 2, sparse_optimizers=[sparse])
    refused("must have kind 'SparseSGD'", sparse_optimizers=[SparseSGD([embedding], 0.1)])
    del sparse, embedding
    gc.collect()  # what the error holds
    graphshard.store.current_job().cluster.settle()
    refused("holds the tensor 'node~_N~e', which is not in the cluster; make it")
    assert load_checkpoint(folder, strict=False).tensors == ("node~_N~x",)
    tensor.delete()
    for shape, dtype in (((NUM_NODES, 3), torch.float32), ((NUM_NODES, 2), torch.float64)):
        other = DistTensor(shape, dtype, "x")
        with pytest.raises(CheckpointError, match=r"is torch.float32 of shape \(90, 2\), node~_N"):
            load_checkpoint(folder, step=1)
        assert not other.count_nonzero()
        other.delete()
    assert load_checkpoint(folder, step=1, model=model, optimizer=optimizer).step == 1
    found = DistTensor((NUM_NODES, 2), torch.float32, "x", persistent=True)
    assert (found[:] == 1).all()
    exit_client()
    for name, error in (("other", "other in-edges"), ("typed 2", r"has 90 rows there, no here")):
        opened(0, 1, parts[name], 0)
        with pytest.raises(CheckpointError, match=f"of another graph: .*{error}"):
            load_checkpoint(folder, step=1)
        assert "node~_N~x" not in graphshard.store.current_job().cluster.names()
    exit_client()
    with pytest.raises(RuntimeError, match="there is no cluster yet"):
        load_checkpoint(folder)


def test_what_cannot_be_saved_is_an_error(parts: dict[str, str], tmp_path: Path) -> None:
    opened(0, 1, parts["plain 2"], 0)
    for error, arguments in (
        ("step must be a whole number", {"step": -1}),
        ("keep must be a whole number", {"keep": 0}),
        ("extra/a must be made of .*got Generator", {"extra": {"a": torch.Generator()}}),
        ("keys of extra must be text .*got tuple", {"extra": {(1, 2): 3}}),
        ("pass optimizers of torch as optimizer", {"sparse_optimizers": [3]}),
        ("without a name", {"sparse_optimizers": [SparseSGD([DistEmbedding(NUM_NODES, 2)], 1)]}),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            save_checkpoint(tmp_path / "c", **{"step": 1, **arguments})
    assert not (tmp_path / "c").exists()
    DistTensor((NUM_NODES,), torch.float32)
    save_checkpoint(tmp_path / "c", 0)  # what has no name is not in it
    assert load_checkpoint(tmp_path / "c").tensors == ()


def wrong_on_one(rank: int, world_size: int, where: str, folder: str) -> list[str]:
    """Errors of which one rank has the cause, as all ranks see them."""
    from graphshard.train.checkpoints import _folder

    _folder.VISIBLE_SECONDS = 0.2
    g = opened(rank, world_size, where, 2)
    tensor = DistTensor((NUM_NODES,), torch.int32, "x", persistent=True)
    tensor[rank::world_size] = torch.ones(NUM_NODES // world_size, dtype=torch.int32)
    found = []

    def refused(action: Callable[[], object]) -> None:
        try:
            action()
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("")

    refused(lambda: save_checkpoint(f"{folder}-{rank}", 1))  # as disks of their own
    save_checkpoint(folder, 1)
    if rank == 0:
        shutil.copytree(folder, f"{folder}-0", dirs_exist_ok=True)
    barrier()
    refused(lambda: load_checkpoint(f"{folder}-{rank}"))
    refused(lambda: load_checkpoint(folder, step=1 + rank))
    if rank == 0:
        flip(Path(folder) / "step-00000001" / "rank-1.safetensors")
    barrier()
    refused(lambda: load_checkpoint(folder))
    assert int(tensor[:].sum()) == NUM_NODES
    del g
    closed()
    return found


def test_an_error_of_one_trainer_is_that_of_all(parts: dict[str, str], tmp_path: Path) -> None:
    with ExitStack() as stack:
        hosts = Hosts(stack, parts["plain 2"], 2, tmp_path)
        found = run_ranks(wrong_on_one, 2, str(hosts.path), str(tmp_path / "c"))
    for unseen, absent, different, damaged in found:
        assert "does not see it there; checkpoint_dir must be on storage that all ranks" in unseen
        assert "missing or damaged" in absent or "not there, for rank 1" in absent
        assert "what is loaded must be the same on all ranks" in different
        assert "no checkpoint in" in damaged
        assert "damaged" in damaged
    assert not list((tmp_path).glob("c-*/.seen*"))


@pytest.mark.parametrize("point", ["write_tensors", "records_of", "write_cluster_manifest"])
def test_a_save_that_is_killed_leaves_the_one_before(
    point: str, parts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "c"
    _, tensor = saved(parts, folder)
    real = getattr(_save, point)

    def die(*arguments: Any) -> None:
        real(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(_save, point, die)
        signal.alarm(30)
        save_checkpoint(folder, 2)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert (folder / "step-00000002.partial").is_dir()
    assert load_checkpoint(folder).step == 1
    assert (tensor[:] == 1).all()
    save_checkpoint(folder, 2)
    assert sorted(p.name for p in folder.glob("step*")) == ["step-00000001", "step-00000002"]
