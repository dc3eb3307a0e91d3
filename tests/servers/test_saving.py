# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a cluster: saved and loaded by other trainers, on other hosts and other parts.

Rows are functions of original ids, so that each can be told wherever it is. Servers run in threads
of the test, trainers are processes, or the test itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saving_cases import NUM_NODES, TOKEN, WIDTH, Hosts, closed, model_of, opened, write_parts
from torch import Tensor

from graphshard.comm import barrier
from graphshard.servers import (
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
    save_checkpoint,
)
from graphshard.testing import RanksFailed, run_ranks


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(autouse=True)
def _leave(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("GRAPHSHARD_HOST", raising=False)
    exit_client()
    yield
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
    ntype = next((t for t in ("item", "/m/0f~x.y") if t in g.ntypes), "_N")
    return g.nodes[ntype].data["feat"]


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


@pytest.mark.parametrize("kind", ["plain", "typed", "named"])
@pytest.mark.parametrize(
    ("saved", "loaded"),  # number of parts, hosts and trainers; without hosts it is one process
    [((2, 0, 1), (5, 3, 2)), ((5, 3, 2), (2, 0, 1)), ((5, 2, 2), (5, 5, 5))],
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


def silent(how: str, seconds: float) -> None:
    """Do nothing for some seconds: stopped by another process, or without the interpreter."""
    if how == "stopped":
        later = f"kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
        with subprocess.Popen(["/bin/sh", "-c", later], start_new_session=True):
            pass  # waits for its end
    else:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def train_and_fall_silent(
    rank: int, world_size: int, where: str, num_hosts: int, folder: str, how: str
) -> None:
    g = opened(rank, world_size, where, num_hosts)
    ids = g.ndata["orig_id"][:]
    new = torch.empty_like(ids).index_copy_(0, ids, torch.arange(NUM_NODES))
    embedding = DistEmbedding(NUM_NODES, WIDTH, "adam")
    if rank == 0:
        embedding.weight[new] = first()
    optimizer = SparseAdam([embedding], 0.01)
    barrier()
    for step in range(2 * STEPS):
        if step % STEPS == 1 and rank == world_size - 1:
            silent(how, 2.5)
        (embedding(new[batch(step)[rank::world_size]]) ** 3).sum().backward()
        optimizer.step()
        if step % STEPS == STEPS - 1:
            save_checkpoint(folder, step, sparse_optimizers=[optimizer], keep=1)
    closed()


def load_rows(rank: int, world_size: int, where: str, num_hosts: int, folder: str) -> Tensor:
    g = opened(rank, world_size, where, num_hosts)
    embedding = DistEmbedding(NUM_NODES, WIDTH, "adam")
    optimizer = SparseAdam([embedding], 0.01)
    load_checkpoint(folder, sparse_optimizers=[optimizer])
    found = torch.empty(NUM_NODES, WIDTH)
    found[g.ndata["orig_id"][:]] = embedding.weight[:]
    closed()
    return found


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("num_trainers", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize("how", ["stopped", "without the interpreter"])
def test_what_a_silent_trainer_holds_is_trained_and_saved(
    how: str, num_trainers: int, parts: dict[str, str], tmp_path: Path
) -> None:
    """It is silent for longer than the limit of its servers."""
    folder = str(tmp_path / "c")
    with ExitStack() as stack:
        hosts = Hosts(stack, parts["plain 2"], num_trainers, tmp_path, silent_seconds=1.0)
        where = str(hosts.path)
        run_ranks(train_and_fall_silent, num_trainers, where, num_trainers, folder, how)
    (found,) = run_ranks(load_rows, 1, parts["plain 5"], 0, folder)
    expected = trained_in_one_process("adam", 2 * STEPS)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


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
        g = DistGraph("g")
        with pytest.raises(RuntimeError, match=r"hosts .2. have no rows of 'edge~_N:_E"):
            save_checkpoint(folder, 6)
        assert load_checkpoint(folder).step == 5
        check_rows(g)
        exit_client()
        initialize(hosts.path)  # all is of one now


def test_the_command_says_what_it_restores_and_serves_it(
    parts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = opened(0, 1, parts["plain 2"], 0)
    tensor = DistTensor((NUM_NODES,), torch.int64, "x", persistent=True)
    tensor[:] = g.ndata["orig_id"][:]
    save_checkpoint(tmp_path / "c", 12)
    exit_client()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "hosts").write_text(f"127.0.0.1 {free.getsockname()[1]}\n")
    command = [sys.executable, "-m", "graphshard", "serve", parts["plain 5"], "--host", "0"]
    command += ["--ip-config", str(tmp_path / "hosts"), "--restore", str(tmp_path / "c")]
    monkeypatch.setenv("GRAPHSHARD_TOKEN", TOKEN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == (
            f"host 0 of 1 restored 1 tensors of step 12 from {tmp_path}/c/step-00000012\n"
        )
        assert server.stdout.readline().startswith("host 0 of 1 serves")
        g = opened(0, 1, str(tmp_path / "hosts"), 1)
        found = DistTensor((NUM_NODES,), torch.int64, "x", persistent=True)
        assert torch.equal(found[:], g.ndata["orig_id"][:])
        exit_client()
    finally:
        server.kill()
        server.communicate(timeout=30)


# ---------------------------------------------------------------------------- older formats

OLD = Path(__file__).parent / "old_checkpoint"
"""Of the format that only clusters had, version 1, written by one trainer on two parts."""


def check_old(g: DistGraph, rank: int, world_size: int) -> None:
    x = DistTensor((NUM_NODES, 2), torch.float32, "x", persistent=True)
    ids = original(g, g.get_node_partition_policy("_N")).float().view(-1, 1)
    assert torch.equal(x[:], ids * torch.tensor([1.0, 10.0]))
    policy = g.get_edge_partition_policy(g.canonical_etypes[0])
    edges = DistTensor((policy.get_size(),), torch.int64, "e", part_policy=policy, persistent=True)
    assert torch.equal(edges[:], original(g, policy) * 3)


def load_old(rank: int, world_size: int, where: str, num_hosts: int, folder: str) -> Any:
    g = opened(rank, world_size, where, num_hosts)
    embedding = DistEmbedding(NUM_NODES, 2, "emb", persistent=True)
    sparse = SparseAdam([embedding], 9.0)
    model, optimizer = model_of(2)
    loaded = load_checkpoint(folder, model=model, optimizer=optimizer, sparse_optimizers=[sparse])
    assert (loaded.step, loaded.extra) == (7, {"epoch": 3, "best": (0.5, float("inf"))})
    assert sparse.lr == 0.25
    torch.testing.assert_close(embedding.weight[:], torch.full((NUM_NODES, 2), -0.25))
    check_old(g, rank, world_size)
    save_checkpoint(folder, 8, model=model, optimizer=optimizer, sparse_optimizers=[sparse])
    loaded = load_checkpoint(folder, sparse_optimizers=[sparse])
    check_old(g, rank, world_size)
    closed()
    moments = optimizer.state_dict()["state"][0]
    return loaded.step, {**model.state_dict(), **moments}, optimizer.param_groups[0]["lr"]


def test_a_checkpoint_of_the_first_format_is_read(
    parts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(OLD, tmp_path / "c")
    written = json.loads((tmp_path / "c" / "step-00000007" / "manifest.json").read_text())
    assert (written["format"], written["format_version"]) == ("graphshard-cluster-checkpoint", 1)
    monkeypatch.setenv("GRAPHSHARD_TOKEN", TOKEN)
    with ExitStack() as stack:
        hosts = Hosts(stack, parts["plain 5"], 2, tmp_path, restore=tmp_path / "c")
        for server in hosts.servers:
            assert server.restored is not None
            assert server.restored.step == 7
        g = opened(0, 1, str(hosts.path), 1)
        check_old(g, 0, 1)
        exit_client()
        found = run_ranks(load_old, 2, str(hosts.path), 2, str(tmp_path / "c"))
    tensors = load_file(OLD / "step-00000007" / "shared.safetensors")
    for step, state, lr in found:
        assert (step, lr) == (8, 0.01)
        for name, value in state.items():
            of_model, moment = f"model/{name}", f"optimizer/state/0/{name}"
            assert torch.equal(value, tensors[of_model if of_model in tensors else moment])
