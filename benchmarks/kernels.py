# SPDX-License-Identifier: Apache-2.0
"""Are the sparse kernels as fast as memory lets them be? One thread, beside DGL, PyG and torch.

Everything runs in one process, in turn, several rounds of it, and is measured in CPU seconds of
that one thread, so that other programs on the machine hardly count. Run it in an environment that
has DGL 1.1.3 and PyG too; where one is missing its columns stay empty. PyG stands where it has an
operator of its own: EdgeIndex.matmul, which keeps the matrix in both orders; utils.scatter of
messages that were gathered edge by edge, as its attention layers do, for several heads; and
utils.softmax over sorted edges.

    python benchmarks/kernels.py --write

writes benchmarks/results/kernels_cpu_<date>.md. A ratio is the time of graphshard over that of the
other, below 1 where graphshard is faster. Each is taken as it comes: graphshard puts large results
where earlier ones were, the others get new memory from the system for each. A second process
measures graphshard and DGL again with freed memory kept by the C library, for both of them: kernel
against kernel. Bytes per second count what each edge reads and each result takes, as if nothing
were ever found in a cache; a copy and a gather of random rows, measured in the same run, tell what
this machine can do. The gradient that a backward pass begins with is made before the clock starts.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DGLBACKEND", "pytorch")

import numpy as np
import torch
import torch.nn.functional as F
from _common import Side, community_graph, markdown_table, run_side, write_result
from torch import Tensor

from graphshard.ops import Adjacency, edge_softmax, gsddmm, gspmm

try:
    import dgl
except ImportError:
    dgl = None
try:
    import torch_geometric as pyg
except ImportError:
    pyg = None

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
OPS = ("sum", "mean", "scaled", "heads", "dot", "add", "softmax")
PASSES = ("forward", "backward")
#: Measured at every width; the others, and all backward passes, at one, unless --full.
PLAIN = ("sum", "mean")
HIDDEN = 128
HEADS = 4
OURS = "graphshard"
PEERS = ("DGL", "PyG", "torch.sparse", "embedding_bag", "plain torch")
KEPT = "DGL, memory kept"
COLUMNS = ("DGL", KEPT, *PEERS[1:])
Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One operator on one graph.

    Args:
        name: What the table calls it.
        sides: Who computes it, and how.
        inputs: What to differentiate by.
        forward_bytes: Bytes that a forward pass moves if nothing is cached.
        backward_bytes: Likewise, a backward pass.
        forward_only: Sides that differentiate by some of the inputs only.
    """

    name: str
    sides: dict[str, Run]
    inputs: tuple[Tensor, ...]
    forward_bytes: int
    backward_bytes: int
    forward_only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """One order of the nodes, in the formats of all sides; edges are sorted by destination."""

    src: Tensor
    dst: Tensor
    num_nodes: int
    adjacency: Adjacency = field(init=False)
    peer: Any = field(init=False)
    pyg: Any = field(init=False)

    def __post_init__(self) -> None:
        adjacency = Adjacency(self.src, self.dst, self.num_nodes, self.num_nodes)
        adjacency.csc()
        adjacency.csr()
        peer = None
        if dgl is not None:
            peer = dgl.graph((self.src, self.dst), num_nodes=self.num_nodes)
            peer.create_formats_()
        edge_index = None
        if pyg is not None:
            edge_index = pyg.EdgeIndex(
                torch.stack([self.src, self.dst]),
                sparse_size=(self.num_nodes, self.num_nodes),
                sort_order="col",
            ).fill_cache_()
        object.__setattr__(self, "adjacency", adjacency)
        object.__setattr__(self, "peer", peer)
        object.__setattr__(self, "pyg", edge_index)

    @property
    def num_edges(self) -> int:
        return int(self.src.shape[0])


def load_graph(path: Path, order: str, idtype: torch.dtype) -> Graph:
    """The graph of the file, its nodes in the file's order or in that of a part."""
    with np.load(path) as arrays:
        src, dst = torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])
        num_nodes = arrays["y"].shape[0]
    if order == "locality":
        new = torch.empty(num_nodes, dtype=torch.int64)
        new[locality_order(path, src, dst, num_nodes)] = torch.arange(num_nodes)
        src, dst = new[src], new[dst]
    by_destination = torch.sort(dst, stable=True).indices
    return Graph(src[by_destination].to(idtype), dst[by_destination].to(idtype), num_nodes)


def locality_order(path: Path, src: Tensor, dst: Tensor, num_nodes: int) -> Tensor:
    """The order that nodes get in a part; kept beside the graph, for another tree to use."""
    kept = path.with_suffix(".order.npy")
    if not kept.exists():
        from graphshard.partition._metis import UndirectedGraph
        from graphshard.partition._node_order import order_nodes

        undirected = UndirectedGraph.from_edges([(src, dst)], num_nodes)
        np.save(kept, order_nodes(np.zeros(num_nodes, np.int64), [0, num_nodes], 1, undirected))
    return torch.from_numpy(np.load(kept))


def sparse_matrix(graph: Graph, values: Tensor) -> Tensor:
    """Rows are destinations, columns sources."""
    indptr, indices, _ = graph.adjacency.csc()
    return torch.sparse_csr_tensor(indptr, indices, values, (graph.num_nodes, graph.num_nodes))


def bag(graph: Graph, rows: Tensor, mode: str, weights: Tensor | None = None) -> Tensor:
    """Reduce rows of sources by destination with `torch.nn.functional.embedding_bag`."""
    indptr, indices, _ = graph.adjacency.csc()
    return F.embedding_bag(
        indices, rows, indptr, mode=mode, per_sample_weights=weights, include_last_offset=True
    )


def cases(graph: Graph, op: str, width: int, dtype: torch.dtype) -> Iterator[Case]:
    """The case, or cases, of one operator; the sides of a case compute the same numbers."""
    adj, peer = graph.adjacency, graph.peer
    nodes, edges, size = graph.num_nodes, graph.num_edges, dtype.itemsize
    ids = edges * graph.src.element_size()
    gather, rows = ids + edges * width * size, nodes * width * size

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    if op in ("sum", "mean"):
        x = leaf(nodes, width)
        ones = torch.ones(edges, dtype=dtype)
        matrix = sparse_matrix(graph, ones)
        values = None if dtype == torch.float32 else ones  # what PyG puts there is float32
        sides = {
            OURS: lambda: gspmm(adj, "copy_lhs", op, x),
            "DGL": lambda: getattr(dgl.ops, f"copy_u_{op}")(peer, x),
            "PyG": lambda: graph.pyg.matmul(x, values, reduce=op, transpose=True),
            "torch.sparse": lambda: torch.sparse.mm(matrix, x, op) if op == "mean" else matrix @ x,
            "embedding_bag": lambda: bag(graph, x, op),
        }
        yield Case(f"copy_u {op}, {width}", sides, (x,), gather + rows, gather + rows)
    elif op == "scaled":
        x, e = leaf(nodes, width), leaf(edges, 1)
        matrix = sparse_matrix(graph, e.detach().view(-1))
        sides = {
            OURS: lambda: gspmm(adj, "mul", "sum", x, e),
            "DGL": lambda: dgl.ops.u_mul_e_sum(peer, x, e),
            "PyG": lambda: graph.pyg.matmul(x, e.view(-1), transpose=True),
            "torch.sparse": lambda: matrix @ x,
            "embedding_bag": lambda: bag(graph, x, "sum", e.view(-1)),
        }
        weights = edges * size
        bytes_back = 2 * gather + 2 * weights + 2 * rows
        moved = gather + rows + weights
        yield Case(f"u_mul_e sum, {width}", sides, (x, e), moved, bytes_back, ("torch.sparse",))
    elif op == "heads":
        x, e = leaf(nodes, HEADS, width // HEADS), leaf(edges, HEADS, 1)
        sides = {
            OURS: lambda: gspmm(adj, "mul", "sum", x, e),
            "DGL": lambda: dgl.ops.u_mul_e_sum(peer, x, e),
            "PyG": lambda: pyg.utils.scatter(x[graph.src] * e, graph.dst, dim_size=nodes),
        }
        weights = edges * HEADS * size
        bytes_back = 2 * gather + 2 * weights + 2 * rows
        name = f"u_mul_e sum, {HEADS} x {width // HEADS}"
        yield Case(name, sides, (x, e), gather + rows + weights, bytes_back)
    elif op == "dot":
        x, y = leaf(nodes, width), leaf(nodes, width)
        zeros = sparse_matrix(graph, torch.zeros(edges, dtype=dtype))
        sides = {
            OURS: lambda: gsddmm(adj, "dot", x, y),
            "DGL": lambda: dgl.ops.u_dot_v(peer, x, y),
            "torch.sparse": lambda: torch.sparse.sampled_addmm(zeros, y, x.t(), beta=0.0),
        }
        weights = edges * size
        bytes_back = 2 * (gather + weights + rows)
        yield Case(f"u_dot_v, {width}", sides, (x, y), gather + rows + weights, bytes_back)
    elif op == "add":
        for heads in (1, HEADS, 8):
            x, y = leaf(nodes, heads, 1), leaf(nodes, heads, 1)
            sides = {
                OURS: lambda x=x, y=y: gsddmm(adj, "add", x, y),
                "DGL": lambda x=x, y=y: dgl.ops.u_add_v(peer, x, y),
                "plain torch": lambda x=x, y=y: x[graph.src] + y[graph.dst],
            }
            values = edges * heads * size
            bytes_back = 2 * values + 2 * nodes * heads * size
            yield Case(f"u_add_v, {heads} x 1", sides, (x, y), 2 * ids + 3 * values, bytes_back)
    else:
        indptr = adj.csc()[0]
        for heads in (1, HEADS, 8):
            logits = leaf(edges, heads, 1)
            sides = {
                OURS: lambda logits=logits: edge_softmax(adj, logits),
                "DGL": lambda logits=logits: dgl.ops.edge_softmax(peer, logits),
                "PyG": lambda logits=logits: pyg.utils.softmax(logits, ptr=indptr),
            }
            values = edges * heads * size
            yield Case(f"edge softmax, {heads} x 1", sides, (logits,), 2 * values, 3 * values)


def seconds_of(run: Run) -> float:
    """CPU seconds of this thread."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def time_in_turn(runs: dict[str, Run], args: argparse.Namespace) -> dict[str, float]:
    """Median CPU seconds of each; the first run counts only where there is no time for others."""
    times = {name: [seconds_of(run)] for name, run in runs.items()}
    for _ in range(args.rounds):
        for name, run in runs.items():
            if sum(times[name]) < args.budget:
                times[name].append(seconds_of(run))
    return {name: statistics.median(taken[1:] or taken) for name, taken in times.items()}


def compare(runs: dict[str, Run], args: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """Seconds of graphshard, and over those of each peer, pair by pair."""
    ours, ratios = 0.0, {}
    for peer in reversed(runs):
        if peer != OURS:
            times = time_in_turn({OURS: runs[OURS], peer: runs[peer]}, args)
            ours, ratios[peer] = times[OURS], times[OURS] / times[peer]
    return ours or time_in_turn(runs, args)[OURS], ratios


def flat(result: Tensor) -> Tensor:
    """The numbers of a result, whatever its form."""
    values = result.values() if result.layout == torch.sparse_csr else result
    return values.detach().reshape(-1).float()


def runs_of(case: Case, part: str, peers: Sequence[str]) -> dict[str, Run]:
    """What to time: graphshard, and those of the peers that can do this operator in this dtype.

    Raises:
        RuntimeError: A side computes other numbers.
    """
    runs: dict[str, Run] = {}
    expected = None
    for name, side in case.sides.items():
        if name not in (OURS, *peers) or (part == "backward" and name in case.forward_only):
            continue
        try:
            with torch.set_grad_enabled(part == "backward"):
                out = side()
            run = torch.no_grad()(side)
            if part == "backward":
                if not out.requires_grad:
                    raise NotImplementedError("no gradient")
                run = partial(gradients, out, case.inputs, torch.ones_like(out))
                run()  # which may lack the dtype, though the operator has it
        except Exception as error:  # a peer lacks the operator, the dtype or the gradient
            if name == OURS:
                raise
            sys.stderr.write(f"{name} cannot do {case.name} {part}: {str(error)[:80]!r}\n")
            continue
        expected = flat(out) if expected is None else expected
        if (flat(out) - expected).abs().max() > 0.02 * expected.abs().max():
            raise RuntimeError(f"{name} computes another {case.name} than {OURS}")
        runs[name] = run
    return runs


def gradients(out: Tensor, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
    """One backward pass, which leaves ``out`` ready for the next."""
    torch.autograd.grad(out, inputs, grad, retain_graph=True)


def memory_speed(width: int, nodes: int, dtype: torch.dtype, args: argparse.Namespace) -> list[str]:
    """Bytes per second of a copy and of a gather of random rows, reads and writes counted."""
    rows = torch.randn(nodes, width).to(dtype)
    out, places = torch.zeros_like(rows), torch.randint(0, nodes, (nodes,))
    runs: dict[str, Run] = {
        "copy": partial(out.copy_, rows),
        "gather": partial(torch.index_select, rows, 0, places, out=out),
    }
    moved = 2 * rows.numel() * rows.element_size()
    times = time_in_turn(runs, args)
    return [str(width), *(f"{moved / times[name] / 1e9:.1f}" for name in runs)]


def keep_memory() -> None:
    """Have freed memory used again, by every side, instead of handed back to the system.

    New pages cost as much as a kernel, and on a virtual machine at times several times that. There
    is no way back: this is for a process of its own.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no result has a mapping of its own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def is_usual(order: str, dtype: torch.dtype, op: str, width: int, part: str) -> bool:
    """Whether a short run, without --full, measures this."""
    if part == "backward" and (order != "locality" or width != HIDDEN):
        return False
    if dtype != torch.float32:
        return op == "sum" and order == "locality" and (width == HIDDEN or dtype.itemsize == 2)
    return width == HIDDEN or op in PLAIN


@dataclass(frozen=True)
class Measured:
    """What was found for one pass of one case.

    Args:
        case: The operator.
        part: The pass.
        seconds: Of graphshard.
        ratios: Of that over the seconds of each peer.
    """

    case: Case
    part: str
    seconds: float
    ratios: dict[str, float]


def measure(
    graph: Graph, order: str, name: str, peers: Sequence[str], args: argparse.Namespace
) -> Iterator[Measured]:
    """All that is asked for, for one order and dtype."""
    dtype = DTYPES[name]
    for op, width, part in itertools.product(args.ops, args.widths, args.passes):
        if not args.full and not is_usual(order, dtype, op, width, part):
            continue
        for case in cases(graph, op, width, dtype):
            seconds, ratios = compare(runs_of(case, part, peers), args)
            found = " | ".join(f"/ {peer} {ratio:.2f}" for peer, ratio in ratios.items())
            sys.stderr.write(f"{case.name} {part} | {seconds * 1e3:.1f} ms | {found}\n")
            yield Measured(case, part, seconds, ratios)


def ratios_with_memory_kept(
    graphs: Iterable[tuple[str, Graph]], args: argparse.Namespace
) -> dict[str, float]:
    """Ratios to DGL, by order, dtype, case and pass; in a process that called `keep_memory`."""
    return {
        f"{order} {name} {found.case.name} {found.part}": found.ratios["DGL"]
        for order, graph in graphs
        for name in args.dtypes
        for found in measure(graph, order, name, ["DGL"], args)
        if "DGL" in found.ratios
    }


def table(
    graph: Graph, order: str, name: str, kept: dict[str, float], args: argparse.Namespace
) -> list[str]:
    """Lines of the results for one order and dtype."""
    missing = {name for name, module in (("DGL", dgl), ("PyG", pyg)) if module is None}
    peers = [peer for peer in PEERS if peer not in missing]
    rows = []
    for found in measure(graph, order, name, peers, args):
        case, part = found.case, found.part
        moved = case.forward_bytes if part == "forward" else case.backward_bytes
        ratios = {**found.ratios, KEPT: kept.get(f"{order} {name} {case.name} {part}")}
        cells = [ratios.get(peer) for peer in COLUMNS]
        rows.append(
            [
                case.name,
                part,
                f"{found.seconds * 1e3:.1f}",
                f"{moved / found.seconds / 1e9:.1f}",
                *("" if ratio is None else f"{ratio:.2f}" for ratio in cells),
            ]
        )
    header = ["operator", "pass", "ms", "GB/s", *(f"/ {peer}" for peer in COLUMNS)]
    return markdown_table(header, rows) if rows else []


def main() -> None:
    """Measure and print, or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=Path, default=Path(tempfile.gettempdir()) / "bench")
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=2_100_000, help="drawn pairs")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--orders", nargs="+", default=["locality", "original"])
    parser.add_argument("--ids", choices=("int32", "int64"), default="int64")
    parser.add_argument("--full", action="store_true", help="every operator at every width, dtype")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for one side of a case")
    parser.add_argument("--write", action="store_true", help="write the results file")
    parser.add_argument("--kept", action="store_true", help="only what the second process does")
    parser.add_argument("--own", action="store_true", help="seconds of graphshard alone, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = community_graph(args.graphs, args.nodes, args.edges)
    graphs = ((order, load_graph(path, order, getattr(torch, args.ids))) for order in args.orders)
    if args.kept:
        keep_memory()
        sys.stdout.write(json.dumps(ratios_with_memory_kept(graphs, args)) + "\n")
        return
    if args.own:
        own = {
            f"{order} {name} {found.case.name} {found.part}": found.seconds
            for order, graph in graphs
            for name in args.dtypes
            for found in measure(graph, order, name, [], args)
        }
        sys.stdout.write(json.dumps(own) + "\n")
        return
    kept: dict[str, float] = {}
    if dgl is not None:
        asked = [word for word in sys.argv[1:] if word != "--write"]
        sys.stderr.write("with memory kept, in another process\n")
        kept = run_side(Side(KEPT, [sys.executable, __file__, *asked, "--kept"]))
    body = []
    for order, graph in graphs:
        for name in args.dtypes:
            sys.stderr.write(f"{order} {name}\n")
            rows = table(graph, order, name, kept, args)
            if not rows:
                continue
            speeds = [memory_speed(w, graph.num_nodes, DTYPES[name], args) for w in args.widths]
            body += [
                f"## {order.capitalize()} order, {name}",
                "",
                *markdown_table(["width", "copy GB/s", "random rows GB/s"], speeds),
                "",
                *rows,
                "",
            ]
    about = (
        f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {args.ids} ids, one thread, median "
        "CPU time. `/ X` is the time of graphshard over that of X, each as it comes: graphshard "
        "puts large results where earlier ones were, the others get new pages from the system. "
        f"`/ {KEPT}` was measured in a second process in which the C library keeps freed memory "
        "for both. PyG runs its EdgeIndex.matmul, utils.scatter and utils.softmax. GB/s count what "
        "each edge reads and each result takes as if no cache held anything; copy and random rows "
        "count what they read and write."
    )
    body[:0] = [about, ""]
    if args.write:
        write_result("kernels", "Sparse kernels", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
