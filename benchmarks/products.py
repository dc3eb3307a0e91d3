# SPDX-License-Identifier: Apache-2.0
"""Products of dense layers: the kernels beside torch's library, forward and backward.

One thread, in turn, in CPU seconds of that thread, so that other programs hardly count.

    python benchmarks/products.py --write

writes benchmarks/results/products_cpu_<date>.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import markdown_table, write_result

from graphshard._base.kernels import kernels_for

ROWS = 100_000
# Of hidden layers, of features that are read first, and of classes that come out last.
SIZES = ((128, 128), (256, 128), (256, 256), (100, 256), (602, 128), (1433, 16), (128, 40), (16, 7))


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
    header = ["matrix", "product", "gradient of rows", "gradient of matrix"]
    body = [
        f"GFLOP/s of one thread, graphshard's / torch's, {ROWS:,} rows of float32; medians of "
        f"{args.rounds} rounds.",
        "",
        *markdown_table(header, rows),
    ]
    if args.write:
        write_result("products", "Products of dense layers", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
