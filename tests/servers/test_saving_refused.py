# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a cluster that are damaged, do not fit, or were never finished.

Each is one error, on all trainers, and changes nothing. Mostly one process; one test on two ranks.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_cases import NUM_NODES, TOKEN, Hosts, closed, flip, model_of, opened, write_parts

import graphshard
from graphshard.comm import barrier
from graphshard.errors import CheckpointError
from graphshard.servers import (
    DistEmbedding,
    DistGraph,
    DistTensor,
    GraphServer,
    SparseAdam,
    SparseSGD,
    WireMessage,
    checkpoints,
    exit_client,
    load_checkpoint,
    save_checkpoint,
)
from graphshard.servers.checkpoints import digest_of_content
from graphshard.testing import run_ranks


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(autouse=True)
def _leave(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("GRAPHSHARD_HOST", raising=False)
    exit_client()
    yield
    exit_client()


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


def saved(parts: dict[str, str], folder: Path, step: int = 1) -> tuple[DistGraph, DistTensor]:
    """A graph alone, with a tensor of ones that is saved, and of twos now."""
    if not graphshard.servers.has_job():
        opened(0, 1, parts["plain 2"], 0)
    g = DistGraph("g")
    tensor = DistTensor((NUM_NODES, 2), torch.float32, "x", persistent=True)
    tensor[:] = torch.full((NUM_NODES, 2), float(step))
    model, optimizer = model_of(1)
    save_checkpoint(folder, step, model=model, optimizer=optimizer)
    tensor[:] = torch.full((NUM_NODES, 2), -1.0)
    return g, tensor


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
        r"has the format \('graphshard-checkpoint', 99\)",
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
    "destinations that are none": (
        lambda f: rewrite(f, lambda c: c.update(destinations={"edge~_N:_E:_N": 3})),
        "destinations name 'edge~_N:_E:_N' or 3",
    ),
    "no destinations of edges": (
        lambda f: rewrite(
            f,
            lambda c: (
                c.update(destinations={}),
                c["tables"].append({**c["tables"][0], "name": "e", "policy": "edge~_N:_E:_N"}),
            ),
        ),
        "the table 'e' does not fit|the table 'e' is of edges without destinations",
    ),
    "a wrong state": (
        lambda f: rewrite(f, lambda c: c["state"].update(model={"tensor": "nowhere"})),
        "which is no value",
    ),
}


def test_a_checkpoint_from_before_types_had_colons(parts: dict[str, str], tmp_path: Path) -> None:
    """Its manifest does not say which nodes the edges of a relation enter: their names do."""
    g, tensor = saved(parts, tmp_path / "c")
    policy = g.get_edge_partition_policy(g.canonical_etypes[0])
    edges = DistTensor((policy.get_size(),), torch.int64, "e", part_policy=policy, persistent=True)
    edges[:] = torch.arange(len(edges))
    save_checkpoint(tmp_path / "c", 2)
    edges[:] = torch.zeros(len(edges), dtype=torch.int64)
    rewrite(tmp_path / "c" / "step-00000002", lambda c: c.pop("destinations"))
    assert load_checkpoint(tmp_path / "c").step == 2
    assert torch.equal(edges[:], torch.arange(len(edges)))
    assert (tensor[:] == -1).all()


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
    graphshard.servers.current_job().cluster.settle()
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
        assert "node~_N~x" not in graphshard.servers.current_job().cluster.names()
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
    checkpoints.VISIBLE_SECONDS = 0.2
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


def lose_and_save(rank: int, world_size: int, where: str, folder: str) -> list[str]:
    """Saves while the servers lack what a trainer uses; what each says, and what is there then."""
    opened(rank, world_size, where, 2)
    cluster = graphshard.servers.current_job().cluster
    embedding = DistEmbedding(NUM_NODES, 2, "e")
    optimizer = SparseAdam([embedding], 0.1)
    other = DistTensor((NUM_NODES,), torch.int32, "x")
    save_checkpoint(folder, 1, sparse_optimizers=[optimizer], keep=1)
    found = []

    def lose(name: str) -> None:
        """As after the servers were started again."""
        barrier()
        if rank == 0:
            lost = WireMessage("delete", {"name": name})
            cluster.ask([(number, lost) for number in range(cluster.num_hosts)])
        barrier()

    def save(step: int, **arguments: Any) -> None:
        try:
            save_checkpoint(folder, step, keep=1, **arguments)
        except RuntimeError as error:
            found.append(str(error))
        barrier()
        found.append(" ".join(sorted(path.name for path in Path(folder).glob("step*"))))
        barrier()

    lose(other.name)
    save(2)
    other.delete()  # on purpose
    lose(optimizer.tensors()[1].name)
    save(3, sparse_optimizers=[optimizer])
    for tensor in optimizer.tensors():
        tensor.delete()
    save(4, sparse_optimizers=[optimizer])
    save(5, extra="the cluster holds no tensors now")
    save(6)
    closed()
    return found


def test_a_save_without_what_a_trainer_uses_is_refused(
    parts: dict[str, str], tmp_path: Path
) -> None:
    """And removes nothing; nor does one without any tensors remove the last one with some."""
    with ExitStack() as stack:
        hosts = Hosts(stack, parts["plain 2"], 2, tmp_path)
        results = run_ranks(lose_and_save, 2, str(hosts.path), str(tmp_path / "c"))
    with_tensors = "step-00000001"
    for found in results:
        first, second, third, fourth = found[0:6:2] + found[7:8]
        for error, name in ((first, "x"), (second, "e.adam_mean"), (third, "e', 'node~_N~e.adam_")):
            assert f"no server has the tensors ['node~_N~{name}" in error
            assert "nothing is saved, and checkpoints that are there stay" in error
        assert found[1:6:2] == [with_tensors] * 3
        assert found[6] == f"{with_tensors} step-00000005"
        assert fourth == f"{with_tensors} step-00000006"
    opened(0, 1, parts["plain 5"], 0)
    embedding = DistEmbedding(NUM_NODES, 2, "e")
    optimizer = SparseAdam([embedding], 0.1)
    x = DistTensor((NUM_NODES,), torch.int32, "x")
    loaded = load_checkpoint(tmp_path / "c", step=1, sparse_optimizers=[optimizer])
    assert {embedding.name, x.name} < set(loaded.tensors)


@pytest.mark.parametrize("point", ["write_tensors", "records_of", "write_manifest"])
def test_a_save_that_is_killed_leaves_the_one_before(
    point: str, parts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "c"
    _, tensor = saved(parts, folder)
    real = getattr(checkpoints, point)

    def die(*arguments: Any) -> None:
        real(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(checkpoints, point, die)
        signal.alarm(30)
        save_checkpoint(folder, 2)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert (folder / "step-00000002.partial").is_dir()
    assert load_checkpoint(folder).step == 1
    assert (tensor[:] == 1).all()
    save_checkpoint(folder, 2)
    assert sorted(p.name for p in folder.glob("step*")) == ["step-00000001", "step-00000002"]
