# SPDX-License-Identifier: Apache-2.0
"""Partitions with one thing damaged: loaded, verified, shown and trained on. Forked children.

A bounded sample, or with ``--all`` 4,000 mutations whose outcomes are written to
``benchmarks/results``. Allowed are a clean error and the result of the undamaged partition.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign_report import write_report
from mutations import mutate
from trials import Campaign, digest, run_trials

import graphshard
from graphshard.data.task import task_path
from graphshard.errors import PartitionFormatError
from graphshard.partition import (
    load_partition,
    load_partition_book,
    partition_graph,
    verify_partition,
)
from graphshard.partition.checked_files import TensorFile, digest_of
from graphshard.partition.format import build_of
from graphshard.train import FullBatchConfig, FullBatchRun, TaskInfo, read_task, write_task
from graphshard.train.commands import run

NUM_CLASSES = 3
OUTCOMES: dict[str, Counter[str]] = {}
COMMAND = "pytest tests/campaigns/test_partition_mutations.py --all"


def random_ids(high: int, count: int, seed: int) -> torch.Tensor:
    return torch.randint(high, (count,), generator=torch.Generator().manual_seed(seed))


def plain_graph() -> graphshard.Graph:
    """60 nodes with loops, a relation number on each edge, and a task."""
    edges = torch.cat([torch.arange(60), random_ids(60, 240, 0)])
    graph = graphshard.graph((edges, torch.cat([torch.arange(60), random_ids(60, 240, 1)])))
    graph.edata["weight"] = torch.rand(300)
    return with_task(graph, "_N")


def typed_graph() -> graphshard.Graph:
    """Two node types and three relations."""
    graph = graphshard.heterograph(
        {
            ("author", "writes", "paper"): (random_ids(20, 90, 2), random_ids(40, 90, 3)),
            ("paper", "written-by", "author"): (random_ids(40, 90, 4), random_ids(20, 90, 5)),
            ("paper", "cites", "paper"): (random_ids(40, 120, 6), random_ids(40, 120, 7)),
        },
        {"author": 20, "paper": 40},
    )
    graph.nodes["author"].data["feat"] = torch.rand(20, 5)
    return with_task(graph, "paper")


def with_task(graph: graphshard.Graph, ntype: str) -> graphshard.Graph:
    data, count = graph.nodes[ntype].data, graph.num_nodes(ntype)
    data["feat"] = torch.rand(count, 6, generator=torch.Generator().manual_seed(8))
    data["label"] = torch.arange(count) % NUM_CLASSES
    place = random_ids(3, count, 9)
    for number, split in enumerate(("train", "val", "test")):
        data[f"{split}_mask"] = place == number
    return graph


def write(
    folder: Path, graph: graphshard.Graph, num_parts: int, target: str, **options: Any
) -> Path:
    partition_graph(graph, "g", num_parts, folder, part_method="random", quiet=True, **options)
    names = tuple(f"class {n}" for n in range(NUM_CLASSES))
    task = TaskInfo(name="g", target=target, num_classes=NUM_CLASSES, class_names=names)
    write_task(folder / "g.json", task)
    return folder


def call(command: str, path: Path) -> tuple[int, str]:
    """A command on whatever is there: no traceback, one line for wrong input; its output."""
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = run([command, str(path)])
    assert code in (0, 1, 2)
    assert errors.getvalue().count("\n") == (code == 2), errors.getvalue()
    return code, printed.getvalue()


def read_everything(folder: Path) -> str:
    """Verify, load and show; what verifying says must agree with what loading does."""
    path = folder / "g.json"
    verified, _ = call("verify", path)
    inspected, shown = call("inspect", path)
    problems = verify_partition(path)
    try:
        loaded = _loaded(path)
        task = read_task(path)
    except PartitionFormatError:
        assert verified, "it does not load, and graphshard verify found nothing"
        raise
    assert not problems, f"it loads, and verify_partition said {problems}"
    assert (verified, inspected) == (0, 0)
    # Without a description, the task is derived from the labels.
    classes = task.num_classes or NUM_CLASSES
    return digest([loaded, shown.partition("task: ")[0], classes, task.num_relations])


def _loaded(path: Path) -> list[Any]:
    found: list[Any] = []
    for part in range(load_partition_book(path, 0)[0].num_partitions()):
        graph, node_feats, edge_feats, book, *names = load_partition(path, part, checksums=True)
        data = graphshard.load_dgl_partition_data(path, part)
        src, dst = graph.edges()
        found += [src, dst, dict(graph.ndata), dict(graph.edata), node_feats, edge_feats, names]
        found += [book.node_map(), book.edge_map(), data.build]
        found += [[e.src_part, e.src, e.dst] for e in data.edges.values()]
    return found


def train(folder: Path) -> str:
    """Two epochs on the only part."""
    typed = len(load_partition_book(folder / "g.json", 0)[2]) > 1
    model = "rgcn" if typed else "sage"
    config = FullBatchConfig(data=str(folder / "g.json"), epochs=2, hidden=4, model=model, seed=1)
    run = FullBatchRun(config.resolved())
    result = run.train()
    parameters = run._learner.shared_state()
    return digest([result.losses, result.best.accuracy, result.num_nodes, parameters])


def damage_and_sign(folder: Path, number: int) -> str:
    """Damage the tensors of a part, and make all digests agree, as who wants to do harm would."""
    rng = random.Random(number)
    path = rng.choice(sorted(folder.glob("part*/*.safetensors")))
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    name = rng.choice([name for name in sorted(header) if name != "__metadata__"])
    first, stop = header[name]["data_offsets"]
    if first < stop:
        width = {"I64": 8, "F64": 8, "I32": 4, "F32": 4}.get(header[name]["dtype"], 1)
        at = start + first + width * rng.randrange((stop - first) // width)
        if rng.random() < 0.5:
            content[at + rng.randrange(width)] ^= 1 << rng.randrange(8)
        else:
            value = rng.choice([-1, 0, 1, 2**31 - 1, -(2**31), 2**62, -(2**63), rng.randrange(99)])
            content[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    path.write_bytes(content)
    sign(folder, path)
    return f"{number}: {path.relative_to(folder)}: an entry of {name}, signed"


def sign(folder: Path, path: Path) -> None:
    """Put the true digest of a tensor file into its header and into the JSON."""
    true, content = digest_of(path), path.read_bytes()
    carried = TensorFile.open(path).blake2b
    path.write_bytes(content.replace(carried.encode(), true.encode(), 1))
    (json_path,) = (p for p in folder.glob("*.json") if not p.name.endswith(".dataset.json"))
    described = json.loads(json_path.read_text())
    files = described[f"part-{path.parent.name.removeprefix('part')}"]["files"]
    files[str(path.relative_to(folder))]["blake2b"] = true
    described["build"] = build_of(described)
    json_path.write_text(json.dumps(described))
    task = task_path(json_path)
    content_of_task = json.loads(task.read_text())
    write_task(json_path, TaskInfo(**{k: content_of_task[k] for k in ("name", "target")}))


def survive(folder: Path) -> None:
    """Verify, load and train on what is signed but wrong: anything but a crash, in our words."""
    with contextlib.suppress(PartitionFormatError):
        call("verify", folder / "g.json")
        _loaded(folder / "g.json")
    try:
        train(folder)
    except (ValueError, FloatingPointError) as error:
        # What is signed is data: a feature or a weight that is no number is named by its part, not
        # by its file, and one that is a number but far too large is found by the gradients.
        if not re.search(
            r"'[\w:]+/(feat|weight)' of part 0 |loss of epoch 1 is not fin", str(error)
        ):
            raise


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of partition, and what is tried on it.

    Args:
        make: Writes the partition.
        use: What is tried.
        sample: Mutations in a usual run.
        whole: Mutations with ``--all``.
        damage: What damages it.
    """

    make: Callable[[Path], Path]
    use: Callable[[Path], Any]
    sample: int
    whole: int
    damage: Callable[[Path, int], str] = mutate


CASES: dict[str, Case] = {
    "plain, 2 parts: load, verify, inspect": Case(
        lambda folder: write(folder, plain_graph(), 2, "_N"), read_everything, 30, 1200
    ),
    "plain, csc and csr: load, verify, inspect": Case(
        lambda folder: write(folder, plain_graph(), 2, "_N", graph_formats=("csc", "csr")),
        read_everything,
        15,
        800,
    ),
    "typed, 3 parts: load, verify, inspect": Case(
        lambda folder: write(folder, typed_graph(), 3, "paper"), read_everything, 15, 800
    ),
    "plain, 1 part: train two epochs": Case(
        lambda folder: write(folder, plain_graph(), 1, "_N"), train, 15, 600
    ),
    "plain, csc and csr, digests made to agree: load, verify, train": Case(
        lambda folder: write(folder, plain_graph(), 1, "_N", graph_formats=("csc", "csr")),
        survive,
        15,
        300,
        damage_and_sign,
    ),
    "typed, digests made to agree: load, verify, train": Case(
        lambda folder: write(folder, typed_graph(), 1, "paper"),
        survive,
        15,
        300,
        damage_and_sign,
    ),
}


def campaign(name: str, tmp_path: Path, run_all: bool) -> Campaign:
    case = CASES[name]
    first = 1_000_000 * list(CASES).index(name)
    numbers = range(first, first + (case.whole if run_all else case.sample))
    original = case.make(tmp_path / "parts")
    return run_trials(case.use, original, tmp_path / "scratch", numbers, damage=case.damage)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(CASES))
def test_a_damaged_partition_is_an_error_or_gives_the_same(
    name: str, tmp_path: Path, run_all: bool
) -> None:
    done = campaign(name, tmp_path, run_all)
    OUTCOMES[name] = done.outcomes
    if run_all and len(OUTCOMES) == len(CASES):
        write_report(
            "partition_mutations",
            "4,000 partitions, each with one thing damaged, loaded, verified, shown and trained on",
            COMMAND,
            OUTCOMES,
            [
                "A mutation flips a bit, overwrites bytes, truncates, extends, deletes, renames or "
                "exchanges a file, puts a pipe, a folder or a link in its place, or changes a "
                "value of a JSON (`tests/campaigns/mutations.py`). A trial may touch memory of "
                "twice the bytes of the folder and 32 MiB; its deadline is a minute. The same "
                "result comes where a byte is overwritten with itself, where a JSON says the same "
                "in another way, and where the description of the task is missing and derived. "
                "In the last two rows an entry of a tensor is changed and all digests are made to "
                "agree with it, as who wants to do harm would: any result is allowed, no crash.",
            ],
        )
    done.check()
