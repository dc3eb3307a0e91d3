# SPDX-License-Identifier: Apache-2.0
"""Partitions that several ranks make in one folder. Up to 3 processes, without a process group."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from partition_cases import plain, random_ids

from graphshard.errors import RankError
from graphshard.partition import (
    GraphFiles,
    PartitionRanks,
    _ranks,
    partition_graph,
    verify_partition,
)
from graphshard.partition._writer import Journal

MEMORY = 1 << 24


def files_of(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def typed_files(folder: Path) -> GraphFiles:
    """Two types, three relations, features of nodes and of edges."""
    folder.mkdir(exist_ok=True)
    counts = {"item": 300, "user": 500}
    edges, edge_features = {}, {}
    for i, (src, name, dst) in enumerate(
        (("user", "likes", "item"), ("item", "in", "user"), ("user", "knows", "user"))
    ):
        paths = []
        for j, ntype in enumerate((src, dst)):
            paths.append(folder / f"{name}-{j}.npy")
            np.save(paths[-1], random_ids(counts[ntype], 3000, 2 * i + j).numpy())
        np.save(folder / f"{name}-w.npy", np.arange(3000, dtype=np.float32) + i)
        edges[src, name, dst] = tuple(paths)
        edge_features[src, name, dst] = {"w": folder / f"{name}-w.npy"}
    features = {}
    for ntype, count in counts.items():
        np.save(folder / f"{ntype}.npy", np.arange(count * 5, dtype=np.float32).reshape(count, 5))
        features[ntype] = {"x": folder / f"{ntype}.npy"}
    return GraphFiles(
        num_nodes=counts, edges=edges, node_features=features, edge_features=edge_features
    )


def run_rank(
    rank: int, num_ranks: int, files: GraphFiles, out: Path, timeout: float = 30.0
) -> None:
    with PartitionRanks(out, rank, num_ranks, timeout=timeout) as ranks:
        if rank:
            ranks.help()
        else:
            make(files, out, ranks=ranks)


def make(files: GraphFiles, out: Path, **more: Any) -> None:
    method = {"part_method": "multilevel", "memory": MEMORY, "quiet": True}
    partition_graph(files, "g", 5, out, **method, **more)


def start(rank: int, out: Path, function: Callable[[], None]) -> int:
    """Run a rank in a process of its own; its error goes to a file beside the folder."""
    child = os.fork()
    if child == 0:
        code = 0
        try:
            torch.set_num_threads(1)
            function()
        except BaseException as error:
            out.with_name(f"{out.name}-{rank}").write_text(str(error))
            code = 1
        finally:
            os._exit(code)
    return child


def end_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ranks, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(_ranks, "_LOOK_SECONDS", 0.02)


@pytest.fixture
def files(tmp_path: Path) -> GraphFiles:
    return typed_files(tmp_path / "data")


@pytest.mark.compiled
@pytest.mark.parametrize("num_ranks", [3, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_bytes_of_one_process(tmp_path: Path, files: GraphFiles, num_ranks: int) -> None:
    make(files, tmp_path / "one")
    out = tmp_path / "g"
    ranks = [
        start(rank, out, partial(run_rank, rank, num_ranks, files, out))
        for rank in range(num_ranks)
    ]
    assert list(map(end_of, ranks)) == [0] * num_ranks
    assert files_of(out) == files_of(tmp_path / "one")
    assert verify_partition(out / "g.json") == []


@pytest.mark.compiled
@pytest.mark.exhaustive  # and so do the campaigns of killed partitions
@pytest.mark.parametrize("stage", ["edges-1", "part-3"])
def test_a_rank_that_is_killed(
    tmp_path: Path, files: GraphFiles, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one says so after the timeout; started again, they go on to the same bytes."""
    make(files, tmp_path / "one")
    out = tmp_path / "g"
    made_by = Journal.make

    def killed(self: Journal, name: str, make: Any) -> Any:
        if name == stage:
            os.kill(os.getpid(), signal.SIGKILL)
        return made_by(self, name, make)

    def die() -> None:
        Journal.make = killed  # type: ignore[method-assign]
        run_rank(1, 2, files, out)

    ranks = start(0, out, partial(run_rank, 0, 2, files, out, 1.0)), start(1, out, die)
    assert list(map(end_of, ranks)) == [1, -signal.SIGKILL]
    said = (tmp_path / "g-0").read_text()
    assert re.fullmatch(
        rf"rank 1 says nothing any more \(waited 1 s for it to finish {stage}\); what is finished "
        "is kept: start the same command again",
        said,
    )
    assert (out / ".g-work" / "journal.json").exists()
    made: list[str] = []

    def noted(self: Journal, name: str, make: Any) -> Any:
        made.append(name)
        return made_by(self, name, make)

    monkeypatch.setattr(Journal, "make", noted)
    helper = start(1, out, partial(run_rank, 1, 2, files, out))
    run_rank(0, 2, files, out)
    assert end_of(helper) == 0
    assert not {"adjacency", "assign", "number", "edges-0"} & set(made)
    assert files_of(out) == files_of(tmp_path / "one")


def test_an_error_is_told_to_the_others(tmp_path: Path, files: GraphFiles) -> None:
    out = tmp_path / "g"
    helper = start(1, out, partial(run_rank, 1, 2, files, out))
    with (
        pytest.raises(ValueError, match="num_parts must be a whole number"),
        PartitionRanks(out, 0, 2) as ranks,
    ):
        partition_graph(files, "g", 0, out, ranks=ranks)
    assert end_of(helper) == 1
    assert (tmp_path / "g-1").read_text().startswith("rank 0 failed: num_parts must be a whole")
    # What that run has left behind says nothing to the next one.
    with pytest.raises(RankError, match="rank 0 did not come .waited 0 s"):
        PartitionRanks(out, 1, 2, timeout=0.3).__enter__()


def test_what_ranks_cannot_share(tmp_path: Path, files: GraphFiles) -> None:
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\) \(got 2\)"):
        PartitionRanks(tmp_path, 2, 2)
    for g, more in ((files, {}), (plain(), {"memory": MEMORY})):
        out = tmp_path / "g"
        with pytest.raises(ValueError, match="share a partition whose edges are on disk"):
            partition_graph(
                g, "g", 2, out, part_method="random", ranks=PartitionRanks(out, 0, 2), **more
            )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "method", [pytest.param("multilevel", marks=pytest.mark.compiled), "random"]
)
def test_torchrun_of_tables(tmp_path: Path, method: str) -> None:
    """Tables are read by rank 0; users' ids, report and task are those of one process."""
    src, dst = random_ids(500, 3000, 0), random_ids(500, 3000, 1)
    rows = [f"u{a},u{b},{a % 7}" for a, b in zip(src.tolist(), dst.tolist(), strict=True)]
    table = tmp_path / "follows.csv"
    table.write_text("\n".join(["src,dst,weight", *rows]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    starters = {"one": [sys.executable], "three": [*torchrun, "--nproc-per-node", "3"]}
    for name, words in starters.items():
        options = f"partition --edges {table} --parts 4 --method {method} --memory 64 --quiet"
        subprocess.run(
            [*words, "-m", "graphshard", *options.split(), "--out", str(tmp_path / name)],
            check=True,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert files_of(tmp_path / "one") == files_of(tmp_path / "three")
    refused = subprocess.run(
        [
            *(*starters["three"], "-m", "graphshard", "partition", "--edges", str(table)),
            *("--parts", "2", "--out", str(tmp_path / "no")),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "error: 3 processes share a partition whose edges are on disk: pass --memory" in (
        refused.stderr
    )
