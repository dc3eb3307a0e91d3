# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: the programs of other libraries compute the same, and a side may fail. One process.

The programs under `benchmarks/peers` are run as they are, on a small graph; DGL is the oracle for
the weights that the programs on PyG begin with.
"""

from __future__ import annotations

import json
import resource
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
Run = Callable[..., dict[str, Any]]


def sparse_warnings(test: Callable[..., None]) -> Callable[..., None]:
    """Torch warns, once in a process, of what PyG's matrices are made of."""
    for text in ("Sparse CSR tensor support is in beta", "Sparse invariant checks are implicitly"):
        test = pytest.mark.filterwarnings(f"ignore:{text}")(test)
    return test


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return pytest.importorskip("_common")


@pytest.fixture
def run_peer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a program in this process, without its limit on memory; returns what it prints."""
    pytest.importorskip("dgl", reason="dgl is not installed")
    pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)

    def run(program: str, *arguments: object) -> dict[str, Any]:
        path = BENCHMARKS / "peers" / f"{program}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        runpy.run_path(str(path), run_name="__main__")
        result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return result

    return run


@sparse_warnings
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("model", ["sage", "gat"])
def test_pyg_trains_as_dgl(model: str, common: ModuleType, run_peer: Run, tmp_path: Path) -> None:
    # Not more epochs: where a gradient is 0 but for rounding, Adam makes a whole step of the rest.
    graph = common.community_graph(tmp_path, 2000, 20000)
    dgl, pyg = (run_peer(f"{peer}_full", graph, model, 1, 3)["losses"] for peer in ("dgl", "pyg"))
    assert dgl[-1] < dgl[0]
    torch.testing.assert_close(torch.tensor(pyg), torch.tensor(dgl), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", ["gat", "gatv2", "agnn"])
def test_pyg_attends_as_dgl(layer: str, common: ModuleType, run_peer: Run, tmp_path: Path) -> None:
    graph = common.community_graph(tmp_path, 400, 2000)
    dgl, pyg = (run_peer(f"{peer}_attention", graph, layer, 1, 1) for peer in ("dgl", "pyg"))
    assert pyg["sum"] == pytest.approx(dgl["sum"], rel=1e-5)


@sparse_warnings
def test_sage_of_pyg_stores_no_messages(run_peer: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_geometric.utils import to_torch_csr_tensor

    layer = pytest.importorskip("_pyg").sage(4, 3)
    monkeypatch.setattr(layer, "message", lambda *_: pytest.fail("one message per edge"))
    graph = to_torch_csr_tensor(torch.tensor([[0, 1, 1], [1, 0, 2]]), size=(3, 3))
    x = torch.rand(3, 4)
    mean = torch.stack([x[1], (x[0] + x[2]) / 2, torch.zeros(4)])
    expected = mean @ layer.lin_l.weight.T + layer.lin_l.bias + x @ layer.lin_r.weight.T
    torch.testing.assert_close(layer(x, graph), expected)


def side(common: ModuleType, program: str, **more: Any) -> Any:
    return common.Side("peer", [sys.executable, "-c", program], **more)


def test_a_side_that_may_fail_says_why(
    common: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    program = f"open({str(runs)!r}, 'a').write('1'); raise MemoryError('16 GB')"
    results = common.run_in_turn([side(common, program, may_fail=True)], 3)
    assert results == {"peer": [{"failed": "MemoryError: 16 GB"}]}
    results["other"] = [{"seconds": 2}]
    assert common.split_failed(results) == (
        {"other": [{"seconds": 2}]},
        {"peer": "MemoryError: 16 GB"},
    )
    assert runs.read_text() == "1"
    assert "round 1/3 peer: {'failed'" in capsys.readouterr().err
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert common.run_side(side(common, killed, may_fail=True)) == {"failed": "ended by SIGKILL"}
    slow = side(common, "import time; time.sleep(60)", may_fail=True, timeout=0.5)
    assert common.run_side(slow)["failed"].startswith("took longer than")


def test_another_side_that_fails_ends_the_benchmark(common: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="peer failed with 1"):
        common.run_side(side(common, "raise MemoryError('16 GB')"))
    works = side(common, "print('{\"seconds\": 2}')")
    assert common.run_side(works) == {"seconds": 2}
