# SPDX-License-Identifier: Apache-2.0
"""PyG's layers on shards on a GPU give what PyG gives in one process on the CPU.

On the emulated GPU (`emulated_gpu`), a few layers, more with ``--all``; and (marked ``gpu``) all
of the zoo on a real one, where float32 is compared with float64, and may be twice as far from it as
PyG itself is on the same GPU. Uses 2 gloo ranks, which share the GPU.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion
from torch_geometric.data import Data

import graphshard
from emulated_gpu import emulated_gpu
from graphshard.testing import run_ranks
from scripts_on_ranks import program_on_emulated_gpu

sys.path.insert(0, str(Path(__file__).parent))

from layer_zoo import compare, limit, zoo

SAMPLE = (
    "GCNConv(edge_weight)",
    "GATv2Conv",
    "SAGEConv(median)",
    "PNAConv(towers,edge_attr)",
    "RGCNConv",
    "DirGNNConv(SAGE)",
    "model GraphNorm",
)

NOT_EMULATED = ("SAGEConv(gru)",)  # nor is torch's own GRU there

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
EMULATED = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.11",
    reason="torch gives no other class to emulated tensors",
)
REAL = [pytest.mark.gpu, needs_gpu]


def compare_on_gpu(
    rank: int, world_size: int, names: list[str], dtype: torch.dtype, mode: str, where: str
) -> dict[str, dict[str, Any]]:
    found = {}
    for case in zoo():
        if case.name in names:
            # cuDNN's recurrent layers round to ten bits unless told otherwise.
            exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
            with emulated_gpu() if where == "emulated" else exact:
                found[case.name] = compare(
                    case, dtype, "random", {"mode": mode}, world_size, "cuda"
                )
    return found


# PyG says so of tensors on a GPU.
@pytest.mark.filterwarnings("ignore:The usage of .*can be accelerated via the 'torch-scatter'")
@pytest.mark.parametrize("mode", ["oneshot", "sequential"])
@pytest.mark.parametrize(
    ("where", "dtype"),
    [
        pytest.param("emulated", torch.float64, marks=EMULATED),
        pytest.param("real", torch.float64, marks=REAL),
        pytest.param("real", torch.float32, marks=REAL),
    ],
)
@pytest.mark.timeout(600)
def test_layers_give_what_pyg_gives_on_the_cpu(
    where: str, dtype: torch.dtype, mode: str, run_all: bool
) -> None:
    cases = {case.name: case for case in zoo() if not case.refused and not case.fails}
    names = list(cases) if run_all or where == "real" else list(SAMPLE)
    if where == "emulated":
        names = [name for name in names if name not in NOT_EMULATED]
    wrong = []
    for found in run_ranks(compare_on_gpu, 2, names, dtype, mode, where, timeout=580.0):
        for name in names:
            result = found[name]
            most = max(limit(cases[name], dtype), 2 * result.get("gap_of_pyg", 0.0))
            if result["error"] or not result["gap"] <= most:
                wrong.append(f"{name}: {result}")
    assert not wrong, "\n".join(wrong)


def drawn_on_gpu(rank: int, world_size: int, moved: str, where: str) -> list[dict[str, Any]]:
    """The first batch on the CPU, and with the data on the GPU."""
    found = []
    for device in ("cpu", "cuda"):
        emulates = device == "cuda" and where == "emulated"
        with program_on_emulated_gpu() if emulates else contextlib.nullcontext():
            data = Data(
                x=torch.arange(40.0).view(20, 2),
                y=torch.arange(20),
                edge_index=torch.stack([torch.arange(60) % 20, torch.arange(60) * 7 % 20]),
                edge_attr=torch.arange(60.0),
            )
            if moved == "before":
                data = data.to(device)
            data = graphshard.pyg.shard(data, "random")
            if moved == "after":
                data = data.to(device)
            (batch, *_) = graphshard.pyg.NeighborLoader(data, [2, 2], batch_size=5, seed=0)
            tensors = {name: batch[name] for name in ("x", "y", "edge_attr", "edge_index")}
            assert {str(tensor.device.type) for tensor in tensors.values()} == {device}
            found.append({name: tensor.cpu() for name, tensor in tensors.items()})
    return found


@pytest.mark.parametrize("moved", ["before", "after"])
@pytest.mark.parametrize("where", ["emulated", pytest.param("real", marks=REAL)])
def test_batches_of_data_on_a_gpu_are_there(where: str, moved: str) -> None:
    """Also where the data was put there after it was sharded."""
    for expected, found in run_ranks(drawn_on_gpu, 2, moved, where):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
