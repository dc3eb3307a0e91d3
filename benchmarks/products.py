# SPDX-License-Identifier: Apache-2.0
"""Products of dense layers and of sparse features: the kernels beside torch, forward and backward.

One thread, in turn, in CPU seconds of that thread, so that other programs hardly count.

    python benchmarks/products.py --write

writes benchmarks/results/products_cpu_<date>.md.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import markdown_table, write_result

from graphshard._base.kernels import kernels_for
from graphshard.train._categories import CategoryTables, SparseFeatures

ROWS = 100_000
# Of hidden layers, of features that are read first, and of classes that come out last.
SIZES = ((128, 128), (256, 128), (256, 256), (100, 256), (602, 128), (1433, 16), (128, 40), (16, 7))
# Rows, non-zeros a row at most, columns: of a whole graph, of a sampled step twice, and of Cora.
SPARSE = ((60_000, 40, 5_000), (8_000, 40, 5_000), (1_000, 40, 100_000), (2_708, 30, 1_433))


def seconds(run: Callable[[], Any]) -> float:
    """CPU seconds of one call by this thread."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def rates(inner: int, width: int, rounds: int) -> list[tuple[float, float]]:
    """GFLOP/s of the kernels and of torch: the product, and gradients of rows and of the matrix."""
    kernels: Any = kernels_for(torch.device("cpu"))
    x, w, grad = torch.randn(ROWS, inner), torch.randn(inner, width), torch.randn(ROWS, width)
    out, of_rows, of_matrix = torch.empty_like(grad), torch.empty_like(x), torch.empty_like(w)
    pairs = [
        (
            lambda: kernels.multiply_rows(out, [x], [w], None, False, 1),
            lambda: torch.mm(x, w, out=out),
        ),
        (
            lambda: kernels.multiply_rows(of_rows, [grad], [w.t()], None, False, 1),
            lambda: torch.mm(grad, w.t(), out=of_rows),
        ),
        (
            lambda: kernels.multiply_transposed(of_matrix, x, grad, 1),
            lambda: torch.mm(x.t(), grad, out=of_matrix),
        ),
    ]
    work = 2e-9 * ROWS * inner * width
    found = []
    for pair in pairs:
        times: list[list[float]] = [[], []]
        for _ in range(rounds + 1):
            for side, run in zip(times, pair, strict=True):
                side.append(seconds(run))
        ours, theirs = (work / statistics.median(side[1:]) for side in times)
        found.append((ours, theirs))
    return found


def milliseconds_of_sparse(
    count: int, most: int, num_columns: int, rounds: int
) -> list[tuple[float, float]]:
    """CPU ms of CategoryTables and of torch's EmbeddingBag, with new features and with the same.

    A sum times a matrix and its gradient; EmbeddingBag is given the non-zeros one after the other,
    which are looked for in new features.
    """
    columns = torch.randint(1, num_columns, (count, most))
    columns = columns.masked_fill_(torch.rand(count, most) < 0.3, 0).sort(1, descending=True).values
    values = torch.rand(count, most)
    tables = CategoryTables({}, {"_N": num_columns})
    width = CategoryTables.widths({}, {"_N": num_columns})["_N"]
    bag = torch.nn.EmbeddingBag(num_columns, width, mode="sum")
    grad = torch.randn(count, width)
    kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    rows = SparseFeatures(columns.int(), values)

    def ours(is_new: bool) -> None:
        given = SparseFeatures(rows.columns.view_as(rows.columns), rows.values) if is_new else rows
        tables({}, {}, {"_N": given})["_N"].backward(grad)

    def theirs(is_new: bool) -> None:
        if is_new or not kept:
            is_entry = columns > 0
            counts = is_entry.sum(1)
            kept[:] = [(columns[is_entry], counts.cumsum(0) - counts, values[is_entry])]
        ids, starts, weights = kept[0]
        bag(ids, starts, per_sample_weights=weights).backward(grad)

    found = []
    for is_new in (True, False):
        times: list[list[float]] = [[], []]
        for _ in range(rounds + 1):
            for side, run in zip(times, (ours, theirs), strict=True):
                tables.zero_grad()
                bag.zero_grad()
                side.append(1e3 * seconds(functools.partial(run, is_new)))
        first, second = (statistics.median(side[1:]) for side in times)
        found.append((first, second))
    return found


def main() -> None:
    """Measure, and print or write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for inner, width in SIZES:
        cells = [f"{a:.0f} / {b:.0f} ({a / b:.1f}x)" for a, b in rates(inner, width, args.rounds)]
        rows.append([f"{inner} x {width}", *cells])
    sparse = []
    for size in SPARSE:
        pairs = milliseconds_of_sparse(*size, args.rounds)
        cells = [f"{a:.1f} / {b:.1f} ({b / a:.1f}x)" for a, b in pairs]
        sparse.append([*(f"{number:,}" for number in size), *cells])
    header = ["matrix", "product", "gradient of rows", "gradient of matrix"]
    body = [
        f"GFLOP/s of one thread, graphshard's / torch's, {ROWS:,} rows of float32; medians of "
        f"{args.rounds} rounds.",
        "",
        *markdown_table(header, rows),
        "",
        "Sparse features times a matrix of 64 columns, and its gradient: CPU ms of one thread, "
        "graphshard's / those of `torch.nn.EmbeddingBag`. Of rows that are seen for the first time "
        "non-zeros are found first, by row and by column; 0.7 of the places have one.",
        "",
        *markdown_table(
            ["rows", "places a row", "columns", "new rows", "the same rows again"], sparse
        ),
    ]
    if args.write:
        write_result("products", "Products of dense layers and of sparse features", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
