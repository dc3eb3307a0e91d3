# SPDX-License-Identifier: Apache-2.0
"""Functions of a notebook's cells on ranks. 2 ranks, started by a process that runs cells.

The process does with cells what IPython does: each is compiled under a name of its own, under which
its text is kept for tracebacks. tests/docs/test_notebooks.py does the same in real notebooks.
"""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from forked_programs import nested_forks, run_program, start_program

RUN_CELLS = """
import linecache, sys, types
main = sys.modules["__main__"] = types.ModuleType("__main__")  # of no file
for number, cell in enumerate(sys.argv[1:]):
    name = f"<cell {number}>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
    exec(compile(cell, name, "exec", dont_inherit=True), vars(main))
"""

IMPORTS = """
import torch
import torch.nn.functional as F
from torch import nn, rand as draw
import graphshard as gs
from dataclasses import dataclass
from graphshard.testing import LocalServers, run_ranks
"""


def start(*cells: str) -> Any:
    return start_program(RUN_CELLS, IMPORTS, *cells)


CELLS = {
    "what it uses": [
        "WIDTH = 4\nx = torch.ones(2, 3)\ndef unused(): return undefined_anywhere",
        "@dataclass\nclass Config:\n    width: int = WIDTH",
        "class Base(nn.Module):\n    pass\nclass Net(Base):\n    def __init__(self, c):\n"
        "        super().__init__()\n        self.linear = nn.Linear(3, c.width)\n"
        "    def forward(self, x):\n        return F.relu(self.linear(x))",
        "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n > 0 and even(n - 1)",
        "graph = gs.data.random_graph(3, 4)  # does not travel, and `work` has its own\n"
        "@torch.no_grad()\ndef work(rank, world_size, factor, unused_graph=None):\n"
        "    graph = draw(2).shape\n    [x for Config2 in range(2)]\n"
        "    return Net(Config())(x) * factor, even(4), list(graph)",
        "(first, second) = run_ranks(work, 2, 3.0)\ntorch.manual_seed(0)\n"
        "assert torch.equal(first[0], work(0, 1, 3.0)[0]) and torch.equal(first[0], second[0])\n"
        "print('shapes', tuple(first[0].shape), first[1:], second[1:])",
    ],
    "the last definition": [
        "def helper(): return 'first'\ndef work(rank, world_size): return helper()",
        "print(run_ranks(work, 1))",
        "def helper(): return 'second'",
        "print(run_ranks(work, 1))",
        "def work(rank, world_size): return 'third'",
        "print(run_ranks(work, 1))",
    ],
    "what cannot travel": [
        "g = gs.data.random_graph(3, 4)",
        "def work(rank, world_size): return helper()\ndef helper(): return g.num_nodes()",
        "try: run_ranks(work, 1)\nexcept TypeError as error: print(error)",
        "try: run_ranks(lambda rank, world_size: 1, 1)\nexcept TypeError as error: print(error)",
    ],
    "an error of a rank": [
        "def work(rank, world_size):\n    if rank == 1:\n        raise KeyError('the cause')\n"
        "    torch.distributed.all_reduce(torch.ones(1))",
        "try: run_ranks(work, 2)\nexcept AssertionError as error: print(error)",
    ],
    "trainers of servers": [
        "g = gs.data.random_graph(10, 20)\n"
        "g.ndata['feat'] = torch.arange(10.0).view(-1, 1)\n"
        "gs.partition.partition_graph(g, 'g', 2, folder, quiet=True)",
        "def work(rank, world_size):\n    gs.servers.initialize()\n"
        "    g = gs.servers.DistGraph('g')\n    total = float(g.ndata['feat'][:].sum())\n"
        "    here = gs.servers.get_rank()\n    gs.servers.exit_client()\n"
        "    import os\n    return total, here, os.environ['GRAPHSHARD_HOST']",
        "with LocalServers(folder + '/g.json', num_hosts=2) as servers:\n"
        "    print(run_ranks(work, 3, servers=servers))",
        "try: LocalServers(folder + '/g.json', num_hosts=3)\nexcept ValueError as e: print(e)",
        "try: LocalServers(folder + '/g.json', num_hosts=0)\nexcept ValueError as e: print(e)",
    ],
}


pytestmark = pytest.mark.usefixtures("nested_forks")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What some cells print, which one process runs: its start takes longer than they do."""
    cells = [f"folder = {str(tmp_path_factory.mktemp('parts'))!r}"]
    for name, group in CELLS.items():
        cells += [f"print({name!r} + ':', flush=True)", *group]
    with nested_forks():
        text = run_program(RUN_CELLS, IMPORTS, *cells, timeout=110)
    parts = re.split("|".join(f"^({name}):\n" for name in CELLS), text, flags=re.MULTILINE)
    names = [part for part in parts if part in CELLS]
    return dict(zip(names, [p for p in parts[1:] if p is not None and p not in CELLS], strict=True))


def test_a_function_takes_along_what_it_uses(printed: dict[str, str]) -> None:
    assert printed["what it uses"] == "shapes (2, 4) (True, [2]) (True, [2])\n"


def test_the_last_definition_counts(printed: dict[str, str]) -> None:
    assert printed["the last definition"] == "['first']\n['second']\n['third']\n"


def test_what_cannot_travel_is_named(printed: dict[str, str]) -> None:
    text = printed["what cannot travel"]
    assert "helper uses g, which does not reach the ranks: g is a Graph; only None, bool" in text
    assert "make g inside helper, or load it there" in text
    assert "fn must be a function that stands in a module" in text


def test_an_error_of_a_rank_comes_into_the_cell(printed: dict[str, str]) -> None:
    text = printed["an error of a rank"]
    assert text.startswith("work on 2 ranks failed\n\nrank 1 raised:\n")
    assert "raise KeyError('the cause')" in text


def test_lines_come_as_they_are_printed(tmp_path: Path) -> None:
    """The second line is printed only once the first has arrived."""
    arrived = str(tmp_path / "arrived")
    process = start(
        "import os, time",
        "def work(rank, world_size, file):\n    print('first')\n"
        "    while not os.path.exists(file): time.sleep(0.01)\n    print('second', end='')",
        f"run_ranks(work, 1, {arrived!r}, stream=True)",
    )
    assert process.stdout.readline() == "[rank 0] first\n"
    Path(arrived).touch()
    assert process.communicate(timeout=60)[0] == "[rank 0] second\n"


def test_trainers_of_servers(printed: dict[str, str]) -> None:
    lines = printed["trainers of servers"].splitlines()
    assert lines[0] == "[(45.0, 0, '0'), (45.0, 1, '0'), (45.0, 2, '1')]"
    assert "hosts" in lines[1]
    assert lines[2] == "num_hosts must be at least 1 (got 0)"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_stopping_the_cell_stops_the_ranks() -> None:
    process = start(
        "import os, time",
        "def work(rank, world_size):\n    print(os.getpid())\n    time.sleep(300)",
        "try: run_ranks(work, 2, stream=True, timeout=300)\n"
        "except KeyboardInterrupt: print('stopped', flush=True)\ntime.sleep(60)",
    )
    lines = [process.stdout.readline() for _ in range(2)]
    ranks = [int(re.fullmatch(r"\[rank \d\] (\d+)\n", line)[1]) for line in lines]  # type: ignore[index]
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "stopped\n"
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    process.kill()
    process.communicate(timeout=30)
