# SPDX-License-Identifier: Apache-2.0
"""Type checkers, and so editors, see DGL's names. One run of mypy on a small file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What a checker must find, of each kind of place; and what it must say is not there.
PROGRAM = """
import graphshard.dgl as dgl
import graphshard.dgl.function as fn
from graphshard.dgl.data import AsNodePredDataset, CoraGraphDataset, load_data, register_data_args
from graphshard.dgl.data.citation_graph import load_cora
from graphshard.dgl.data.utils import download, extract_archive, save_info
from graphshard.dgl.dataloading import DataLoader, NeighborSampler
from graphshard.dgl.distributed import DistGraph, GraphPartitionBook
from graphshard.dgl.nn.pytorch import ChebConv, GraphConv, LabelPropagation, SumPooling
from graphshard.dgl.optim import SparseAdagrad

reveal_type(dgl.batch)
reveal_type(dgl.DGLGraph)
reveal_type(dgl.nn.GMMConv(4, 2, 3, 5))
reveal_type(dgl.sampling.random_walk)
reveal_type(fn.copy_u("h", "m"))
reveal_type(load_cora)
reveal_type(AsNodePredDataset)
reveal_type(LabelPropagation(2, 0.5))
dgl.no_such_name
dgl.nn.GMMConv(4)
"""
FOUND = (
    "graphs: ",
    "graphshard.graph.",
    '"graphshard.dgl.nn.edge_convs.GMMConv"',
    "metapath: ",
    "MessageFunction",
    "raw_dir: ",
    "dataset: Any",
    '"graphshard.dgl.nn.propagation.LabelPropagation"',
)


@pytest.mark.timeout(300)
def test_checkers_see_dgls_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="the checker is in the extra dev")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [
        sys.executable, "-m", "mypy", "--config-file=", "--python-version=3.10",
        "--follow-imports=silent", "--ignore-missing-imports",
        "--no-site-packages",  # no torch: faster
        f"--cache-dir={tmp_path / 'cache'}",
        str(program),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = done.stdout.splitlines()
    revealed = [line for line in lines if "Revealed type" in line]
    assert len(revealed) == len(FOUND), done.stdout + done.stderr
    for line, part in zip(revealed, FOUND, strict=True):
        assert part in line
    errors = [line for line in lines if "error:" in line]
    assert len(errors) == 2, done.stdout
    assert 'no attribute "no_such_name"' in errors[0]
    assert "GMMConv" in errors[1]
