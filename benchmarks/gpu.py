# SPDX-License-Identifier: Apache-2.0
"""Sums over edges, attention and full-batch epochs on a GPU, beside torch, cuSPARSE and PyG.

    python benchmarks/gpu.py --write                        # both graphs, one file under results/
    python benchmarks/gpu.py --graphs 200000:2100000        # one graph: nodes, and pairs drawn
    python benchmarks/gpu.py --device cpu --graphs 300:2000 --rounds 1 --calls 1

The graphs have 200 k nodes and 4.07 M edges, and 1 M nodes and about 24.7 M edges. The program
takes torch with CUDA, numpy and the working tree (``PYTHONPATH=src`` where graphshard is not
installed); the sides of PyG are left out, with a line that says so, where it is not installed.

All sides run in one process, in turn, several rounds of it; a time is the median over rounds of the
mean of several calls, from one synchronisation to the next. The bandwidth of a sum is what each
edge reads and each result takes, as if nothing were found in a cache; that of a gather of the same
rows in the same order, in the same run, is what the device can do. Peak memory is that of torch's
allocator above what lay there before. A side that runs out of memory says so in place of its time.
``--device cpu`` with small numbers tries the program where there is no GPU.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import importlib
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _common import RESULTS, ROOT, card_of, community_graph, markdown_table
from torch import Tensor, nn

import graphshard
from graphshard import nn as gnn

try:
    import torch_geometric
    import torch_geometric.nn as pyg_nn
    from torch_geometric.utils import scatter
except ImportError:
    pyg_nn = None

GIB = 2**30
NO_PYG = "PyG is not installed, so its sides are left out: `pip install torch-geometric`."
Call = Callable[[], Any]


@dataclass(frozen=True)
class Cost:
    """Of a call.

    Args:
        seconds: Median over rounds; infinite where memory did not suffice.
        peak: Bytes above what was allocated before.
    """

    seconds: float
    peak: int

    def times(self, other: Cost) -> str:
        """This time over another."""
        return "out of memory" if self.seconds == torch.inf else _ratio(self.seconds, other.seconds)

    def memory(self, other: Cost) -> str:
        """This memory over another."""
        return _ratio(self.peak, other.peak) if other.seconds < torch.inf and other.peak else ""


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}"


class Measured:
    """Seconds and peak bytes of some calls, round by round."""

    def __init__(self, device: torch.device, rounds: int, calls: int) -> None:
        self.device, self.rounds, self.calls = device, rounds, calls

    def __call__(self, sides: Mapping[str, Call]) -> dict[str, Cost]:
        """The cost of each side; the sides run in turn."""
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        peaks = {name: self._peak(call) for name, call in sides.items()}
        for _ in range(self.rounds):
            for name, call in sides.items():
                if peaks[name] is not None:
                    seconds[name].append(self._seconds(call))
        return {
            name: Cost(torch.inf, 0)
            if peak is None
            else Cost(statistics.median(seconds[name]), peak)
            for name, peak in peaks.items()
        }

    def _seconds(self, call: Call) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(self.calls):
            call()
        self._wait()
        return (time.perf_counter() - start) / self.calls

    def _peak(self, call: Call) -> int | None:
        """Of a second call: the first compiles, chooses configurations and fills caches."""
        try:
            call()
            if self.device.type != "cuda":
                call()
                return 0
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
            self._wait()
            return torch.cuda.max_memory_allocated() - before
        except torch.OutOfMemoryError:
            gc.collect()
            torch.cuda.empty_cache()
            return None

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def sums(g: graphshard.Graph, measured: Measured, widths: list[int]) -> list[str]:
    """Sum of source rows over in-edges: a product with a sparse matrix."""
    src, dst = (ids.long() for ids in g.edges(order="eid"))
    nodes, edges = g.num_nodes(), g.num_edges()
    indptr, indices, _ = g.adj_tensors("csc")
    ones = torch.ones(edges, device=src.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's sparse tensors are in beta
        matrix = torch.sparse_csr_tensor(indptr, indices, ones, (nodes, nodes))
    table = []
    for width in widths:
        x = torch.randn(nodes, width, device=src.device)
        weights = torch.rand(edges, 1, device=src.device)
        sides: dict[str, Call] = {
            "graphshard": lambda x=x: graphshard.ops.gspmm(g, "copy_lhs", "sum", x),
            "weighted": lambda x=x, w=weights: graphshard.ops.gspmm(g, "mul", "sum", x, w),
            "cuSPARSE": lambda x=x: matrix @ x,
            "gather": lambda x=x: x.index_select(0, indices),
        }
        if pyg_nn is not None:
            sides["PyG"] = lambda x=x: scatter(x.index_select(0, src), dst, 0, nodes, "sum")
        torch.testing.assert_close(sides["graphshard"](), sides["cuSPARSE"](), rtol=1e-3, atol=1e-3)
        found = measured(sides)
        ours, gather = found["graphshard"], found["gather"]
        gathered = 2 * edges * width * 4 / gather.seconds
        read = (edges + nodes) * width * 4 / ours.seconds
        table.append(
            [
                width,
                f"{ours.seconds * 1e3:.2f}",
                f"{found['weighted'].seconds * 1e3:.2f}",
                found["cuSPARSE"].times(ours),
                found["PyG"].times(ours) if "PyG" in found else "",
                f"{read / 1e9:.0f} / {gathered / 1e9:.0f} = {_ratio(read, gathered)}"
                if gathered
                else "out of memory",
            ]
        )
    header = [
        *("features", "ms", "ms with a weight per edge", "cuSPARSE's time over ours"),
        *("PyG's scatter over ours", "GB/s, of a gather's"),
    ]
    return ["### Sum over in-edges", "", *markdown_table(header, table), ""]


def attention(g: graphshard.Graph, measured: Measured) -> list[str]:
    """GAT's layer, forward and backward, with heads of several widths."""
    edge_index = torch.stack([ids.long() for ids in g.edges(order="eid")])
    table = []
    for heads, dim in ((8, 8), (8, 32), (1, 256)):
        x = torch.randn(g.num_nodes(), 128, device=g.device)
        ours = gnn.GATConv(128, dim, heads, allow_zero_in_degree=True).to(g.device)
        sides: dict[str, Call] = {"graphshard": lambda m=ours, x=x: _backward(m, m(g, x))}
        if pyg_nn is not None:
            theirs = pyg_nn.GATConv(128, dim, heads, add_self_loops=False).to(g.device)
            with torch.no_grad():
                theirs.lin.weight.copy_(ours.fc.weight)
                theirs.att_src.copy_(ours.attn_l)
                theirs.att_dst.copy_(ours.attn_r)
            sides["PyG"] = lambda m=theirs, x=x: _backward(m, m(x, edge_index))
        found = measured(sides)
        mine = found["graphshard"]
        row = [f"{heads} x {dim}", f"{mine.seconds * 1e3:.1f}", f"{mine.peak / GIB:.3f}"]
        if "PyG" in found:
            its = found["PyG"]
            row += [its.times(mine), mine.memory(its)]
            if its.seconds < torch.inf:
                expected = sides["PyG"]()
                for one, other in zip(sides["graphshard"]()[:1], expected[:1], strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
                del expected
        else:
            row += ["", ""]
        table.append(
            [*row, *(_repeats(sides[name]) for name in ("graphshard", "PyG") if name in found)]
        )
    header = [
        *("heads", "ms", "GiB", "PyG's time over ours", "our memory over PyG's"),
        *("ours repeats bit for bit", "PyG's"),
    ]
    width = len(table[0])
    return ["### GAT layer, forward and backward", "", *markdown_table(header[:width], table), ""]


def _backward(model: nn.Module, out: Tensor) -> list[Tensor]:
    """The result, and the gradients of all parameters."""
    out = out.flatten(1)
    return [out.detach(), *torch.autograd.grad(out.square().mean(), list(model.parameters()))]


def _repeats(call: Call) -> str:
    """Whether a second call gives the same bits."""
    try:
        return "yes" if all(map(torch.equal, call(), call())) else "no"
    except torch.OutOfMemoryError:
        return ""


def epochs(g: graphshard.Graph, data: Any, measured: Measured, hidden: int) -> list[str]:
    """Two layers, full batch: an epoch of training."""
    edge_index = torch.stack([ids.long() for ids in g.edges(order="eid")])
    x, y, train = (torch.from_numpy(data[name]).to(g.device) for name in ("x", "y", "train"))
    classes = int(y.max()) + 1
    table = []
    for name in ("SAGE", "GAT"):
        ours, theirs = _models(name, x.shape[1], hidden, classes, g.device)
        models = {"graphshard": (ours, g)}
        if theirs is not None:
            models["PyG"] = theirs, edge_index
            if name == "SAGE":  # messages are not stored where edges are a sparse matrix
                models["PyG, sparse matrix"] = copy.deepcopy(theirs), _matrix(g)
        losses: dict[str, list[Tensor]] = {side: [] for side in models}
        found = measured(
            {
                side: _epoch(model, graph, (x, y, train), losses[side])
                for side, (model, graph) in models.items()
            }
        )
        mine = found["graphshard"]
        for side, cost in found.items():
            if cost.seconds < torch.inf:
                torch.testing.assert_close(
                    losses[side][0], losses["graphshard"][0], rtol=1e-4, atol=1e-4
                )
            shown = [f"{float(loss):.6f}" for loss in losses[side][:1] + losses[side][-1:]]
            ms = f"{cost.seconds * 1e3:.1f}"
            peak = f"{cost.peak / GIB:.2f}"
            table.append([name, side, ms, cost.times(mine), peak, mine.memory(cost), *shown])
    header = ["model", "side", "ms", "time over ours", "GiB", "our memory over its"]
    header += ["first loss", f"loss after {2 + measured.rounds * measured.calls} epochs"]
    title = f"### An epoch of two layers, hidden {hidden}"
    return [title, "", *markdown_table(header, table), ""]


def _matrix(g: graphshard.Graph) -> Tensor:
    """Rows are destinations, as PyG takes them."""
    indptr, indices, _ = g.adj_tensors("csc")
    ones = torch.ones(g.num_edges(), device=g.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.sparse_csr_tensor(indptr, indices, ones, (g.num_nodes(), g.num_nodes()))


def _epoch(model: nn.Module, graph: Any, data: tuple[Tensor, ...], losses: list[Tensor]) -> Call:
    x, y, train = data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def epoch() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(graph, x)[train], y[train])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    return epoch


class TwoLayers(nn.Module):
    """Two layers with an activation between; heads side by side."""

    def __init__(self, first: nn.Module, second: nn.Module, of_graph: bool) -> None:
        super().__init__()
        self.first, self.second, self.of_graph = first, second, of_graph

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer(graph, x) if self.of_graph else layer(x, graph)
            x = x.flatten(1)
            x = F.relu(x) if layer is self.first else x
        return x


def _models(name: str, width: int, hidden: int, out: int, device: Any) -> tuple[Any, Any]:
    """The same model with the same parameters, ours and PyG's; None where there is no PyG."""
    sizes = [(width, hidden), (hidden, out)]
    ours, theirs = [], []
    for one, other in sizes:
        heads = 4 if other == hidden else 1
        if name == "SAGE":
            mine = gnn.SAGEConv(one, other, "mean")
        else:
            mine = gnn.GATConv(one, other // heads, heads, allow_zero_in_degree=True)
        ours.append(mine)
        if pyg_nn is None:
            continue
        if name == "SAGE":
            its = pyg_nn.SAGEConv(one, other)
            its.lin_l.weight, its.lin_r.weight = mine.fc_neigh.weight, mine.fc_self.weight
            its.lin_l.bias = mine.fc_self.bias
        else:
            its = pyg_nn.GATConv(one, other // heads, heads, add_self_loops=False)
            its.lin.weight, its.bias = mine.fc.weight, mine.bias
            its.att_src, its.att_dst = mine.attn_l, mine.attn_r
        theirs.append(its)
    # Copied before the first moves: parameters are shared so far.
    peer = copy.deepcopy(TwoLayers(*theirs, of_graph=False)).to(device) if theirs else None
    return TwoLayers(*ours, of_graph=True).to(device), peer


def of_graph(nodes: int, pairs: int, args: Any, measured: Measured) -> list[str]:
    """All that is measured on one graph."""
    torch.manual_seed(0)
    data = np.load(community_graph(args.folder, nodes, pairs))
    ends = tuple(torch.from_numpy(data[name]).int() for name in ("src", "dst"))
    g = graphshard.graph(ends, num_nodes=nodes).to(measured.device)
    lines = [f"## {g.num_nodes():,} nodes, {g.num_edges():,} edges", ""]
    parts: list[Call] = [
        lambda: sums(g, measured, args.widths),
        lambda: attention(g, measured),
        lambda: epochs(g, data, measured, args.hidden),
    ]
    for part in parts:
        found = part()
        sys.stderr.write("\n".join(found) + "\n")
        lines += found
        if measured.device.type == "cuda":
            torch.cuda.empty_cache()
    return lines


def choices() -> list[str]:
    """The configurations of kernels that were chosen."""
    try:
        tune = importlib.import_module("graphshard.ops.triton._tune")
    except ImportError:
        return []
    rows = [(" ".join(map(str, key)), dict(found)) for key, found in tune._chosen.items()]
    if not rows:
        return []
    return ["## Configurations chosen", "", *markdown_table(["kernel", "configuration"], rows), ""]


def main() -> None:
    """Read the arguments, measure, and print or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--graphs",
        nargs="+",
        default=["200000:2100000", "1000000:12700000"],
        help="nodes, and pairs drawn",
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    args = parser.parse_args()
    device = torch.device(args.device)
    measured = Measured(device, args.rounds, args.calls)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    memory = ""
    if device.type == "cuda":
        memory = f", {torch.cuda.get_device_properties(device).total_memory / GIB:.0f} GiB"
    body: list[str] = []
    for sizes in args.graphs:
        nodes, pairs = map(int, sizes.split(":"))
        body += of_graph(nodes, pairs, args, measured)
    peer = NO_PYG if pyg_nn is None else f"PyG {torch_geometric.__version__}."
    lines = [
        f"# Sums over edges, attention and epochs on {name}{memory}, beside cuSPARSE and PyG",
        "",
        *body,
        *choices(),
        f"Medians of {args.rounds} rounds of {args.calls} calls. {peer}",
        "",
        f"Command: `python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`  ",
        f"{datetime.date.today()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}.",
        "",
    ]
    text = "\n".join(lines)
    sys.stdout.write(text)
    if args.write:
        (RESULTS / f"gpu_{card_of(name)}_{datetime.date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
