# SPDX-License-Identifier: Apache-2.0
"""Sums over edges, attention and full-batch epochs on a GPU, beside torch, cuSPARSE and PyG.

    python benchmarks/gpu.py --write                                # 200 k nodes, 4.07 M edges
    python benchmarks/gpu.py --nodes 1000000 --edges 12700000       # 1 M nodes, about 24.7 M

All sides run in one process, in turn, several rounds of it; a time is the median over rounds of the
mean of several calls, between two events of the device. The bandwidth of a sum is what each edge
reads and each result takes, as if nothing were found in a cache; that of a gather of as many random
rows, in the same run, is what the device can do. Peak memory is that of torch's allocator above
what lay there before. ``--device cpu`` with small numbers tries the program where there is no GPU.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _common import RESULTS, ROOT, community_graph, markdown_table
from torch import Tensor, nn

import graphshard
from graphshard import nn as gnn

try:
    import torch_geometric.nn as pyg_nn
    from torch_geometric.utils import scatter
except ImportError:
    pyg_nn = None

GIB = 2**30
Call = Callable[[], Any]


class Measured:
    """Seconds and peak bytes of some calls, round by round."""

    def __init__(self, device: torch.device, rounds: int, calls: int) -> None:
        self.device, self.rounds, self.calls = device, rounds, calls

    def __call__(self, sides: Mapping[str, Call]) -> dict[str, tuple[float, int]]:
        """(median seconds, peak bytes) of each side; the sides run in turn."""
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        peaks: dict[str, int] = {}
        for name, call in sides.items():  # compiles, and fills caches
            call()
            peaks[name] = self._peak(call)
        for _ in range(self.rounds):
            for name, call in sides.items():
                seconds[name].append(self._seconds(call))
        return {name: (statistics.median(seconds[name]), peaks[name]) for name in sides}

    def _seconds(self, call: Call) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(self.calls):
            call()
        self._wait()
        return (time.perf_counter() - start) / self.calls

    def _peak(self, call: Call) -> int:
        if self.device.type != "cuda":
            return 0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        self._wait()
        return torch.cuda.max_memory_allocated() - before

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def sums(g: graphshard.Graph, measured: Measured, widths: list[int]) -> list[str]:
    """Sum of source rows over in-edges: a product with a sparse matrix."""
    src, dst = (ids.long() for ids in g.edges(order="eid"))
    nodes, edges = g.num_nodes(), g.num_edges()
    indptr, indices, _ = g.adj_tensors("csc")
    ones = torch.ones(edges, device=src.device)
    matrix = torch.sparse_csr_tensor(indptr, indices, ones, (nodes, nodes))
    table = []
    for width in widths:
        x = torch.randn(nodes, width, device=src.device)
        sides: dict[str, Call] = {
            "graphshard": lambda x=x: graphshard.ops.gspmm(g, "copy_lhs", "sum", x),
            "cuSPARSE": lambda x=x: matrix @ x,
            "gather": lambda x=x: x.index_select(0, src),
        }
        if pyg_nn is not None:
            sides["PyG"] = lambda x=x: scatter(x.index_select(0, src), dst, 0, nodes, "sum")
        torch.testing.assert_close(sides["graphshard"](), sides["cuSPARSE"](), rtol=1e-3, atol=1e-3)
        found = measured(sides)
        ours = found["graphshard"][0]
        gathered = 2 * edges * width * 4 / found["gather"][0]
        read = (edges + nodes) * width * 4 / ours
        table.append(
            [
                width,
                f"{ours * 1e3:.2f}",
                f"{found['cuSPARSE'][0] / ours:.2f}",
                f"{found['PyG'][0] / ours:.2f}" if "PyG" in found else "",
                f"{read / 1e9:.0f} / {gathered / 1e9:.0f} = {read / gathered:.2f}",
            ]
        )
    header = ["features", "ms", "cuSPARSE's time", "PyG's", "GB/s, of a gather's"]
    return ["## Sum over in-edges, times over graphshard's", "", *markdown_table(header, table), ""]


def attention(g: graphshard.Graph, measured: Measured) -> list[str]:
    """GAT's layer, forward and backward, with 8 heads of 8 and of 32."""
    if pyg_nn is None:
        return ["PyG is not installed: no comparison of layers.", ""]
    edge_index = torch.stack([ids.long() for ids in g.edges(order="eid")])
    table = []
    for heads, dim in ((8, 8), (8, 32), (1, 256)):
        x = torch.randn(g.num_nodes(), 128, device=g.device)
        ours = gnn.GATConv(128, dim, heads, allow_zero_in_degree=True).to(g.device)
        theirs = pyg_nn.GATConv(128, dim, heads, add_self_loops=False).to(g.device)
        with torch.no_grad():
            theirs.lin.weight.copy_(ours.fc.weight)
            theirs.att_src.copy_(ours.attn_l)
            theirs.att_dst.copy_(ours.attn_r)
        sides: dict[str, Call] = {
            "graphshard": lambda ours=ours, x=x: ours(g, x).square().mean().backward(),
            "PyG": lambda theirs=theirs, x=x: theirs(x, edge_index).square().mean().backward(),
        }
        mine, its = ours(g, x).flatten(1), theirs(x, edge_index)
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-3)
        del mine, its
        found = measured(sides)
        (ours_s, ours_bytes), (its_s, its_bytes) = found["graphshard"], found["PyG"]
        memory = f"{ours_bytes / max(its_bytes, 1):.2f}"
        table.append([f"{heads} x {dim}", f"{ours_s * 1e3:.1f}", f"{its_s / ours_s:.2f}", memory])
    header = ["heads", "ms", "PyG's time over graphshard's", "graphshard's memory over PyG's"]
    return ["## GAT layer, forward and backward", "", *markdown_table(header, table), ""]


def epochs(g: graphshard.Graph, data: Any, measured: Measured, hidden: int) -> list[str]:
    """Two layers, full batch: an epoch of training."""
    if pyg_nn is None:
        return []
    edge_index = torch.stack([ids.long() for ids in g.edges(order="eid")])
    x, y, train = (torch.from_numpy(data[name]).to(g.device) for name in ("x", "y", "train"))
    classes = int(y.max()) + 1
    table = []
    for name in ("SAGE", "GAT"):
        ours, theirs = _models(name, x.shape[1], hidden, classes, g.device)
        losses: dict[str, list[Tensor]] = {"graphshard": [], "PyG": []}
        sides: dict[str, Call] = {}
        for side, model, graph in (("graphshard", ours, g), ("PyG", theirs, edge_index)):
            sides[side] = _epoch(model, graph, (x, y, train), losses[side])
        found = measured(sides)
        (ours_s, ours_bytes), (its_s, its_bytes) = found["graphshard"], found["PyG"]
        first = [float(losses[side][0]) for side in ("graphshard", "PyG")]
        last = [float(losses[side][-1]) for side in ("graphshard", "PyG")]
        table.append(
            [
                name,
                f"{ours_s * 1e3:.1f}",
                f"{its_s / ours_s:.2f}",
                f"{ours_bytes / max(its_bytes, 1):.2f} ({ours_bytes / GIB:.2f} GiB)",
                f"{first[0]:.5f} {last[0]:.5f} / {first[1]:.5f} {last[1]:.5f}",
            ]
        )
    header = ["model", "ms", "PyG's time", "memory of PyG's", "losses, first and last / PyG's"]
    title = f"## An epoch of two layers, hidden {hidden}, over graphshard's"
    return [title, "", *markdown_table(header, table), ""]


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
    """The same model with the same parameters, ours and PyG's."""
    sizes = [(width, hidden), (hidden, out)]
    ours, theirs = [], []
    for one, other in sizes:
        if name == "SAGE":
            mine, its = gnn.SAGEConv(one, other, "mean"), pyg_nn.SAGEConv(one, other)
            its.lin_l.weight, its.lin_r.weight = mine.fc_neigh.weight, mine.fc_self.weight
            its.lin_l.bias = mine.fc_self.bias
        else:
            heads = 4 if other == hidden else 1
            mine = gnn.GATConv(one, other // heads, heads, allow_zero_in_degree=True)
            its = pyg_nn.GATConv(one, other // heads, heads, add_self_loops=False)
            its.lin.weight, its.bias = mine.fc.weight, mine.bias
            its.att_src, its.att_dst = mine.attn_l, mine.attn_r
        ours.append(mine)
        theirs.append(its)
    model = TwoLayers(*ours, of_graph=True).to(device)
    peer = TwoLayers(*theirs, of_graph=False)
    return model, copy.deepcopy(peer).to(device)


def main() -> None:
    """Read the arguments, measure, and print or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=2_100_000, help="pairs drawn")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    data = np.load(community_graph(args.folder, args.nodes, args.edges))
    ends = tuple(torch.from_numpy(data[name]).int() for name in ("src", "dst"))
    g = graphshard.graph(ends, num_nodes=args.nodes).to(device)
    measured = Measured(device, args.rounds, args.calls)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    lines = [
        f"# Kernels and epochs on {name}, beside cuSPARSE and PyG",
        "",
        f"{g.num_nodes():,} nodes, {g.num_edges():,} edges.",
        "",
        *sums(g, measured, args.widths),
        *attention(g, measured),
        *epochs(g, data, measured, args.hidden),
        f"Command: `python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`  ",
        f"{datetime.date.today()}, Python {platform.python_version()}, torch {torch.__version__}.",
        "",
    ]
    text = "\n".join(lines)
    sys.stdout.write(text)
    if args.write:
        (RESULTS / f"gpu_{args.nodes}_{datetime.date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
