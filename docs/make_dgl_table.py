# SPDX-License-Identifier: Apache-2.0
"""Writes docs/guides/dgl_layers.md: every layer of DGL on our graphs, against DGL on its own.

    python docs/make_dgl_table.py

Runs all layers of ``tests/core/dgl_layer_zoo.py`` in one process, and on 2, 3 and 4 ranks with
METIS and random parts, in both modes, in float64 and float32: a few minutes. A test compares the
page with the list of layers, and a sample of the rows with reality; ``make test-all`` all of them.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "core"))

from dgl_layer_zoo import DglLayer, zoo  # noqa: E402

PAGE = ROOT / "docs" / "guides" / "dgl_layers.md"
RANKS, CUTS, MODES = (2, 3, 4), ("metis", "random"), ("oneshot", "sequential")
HEAD = """# DGL's layers on our graphs

Written by `docs/make_dgl_table.py` with DGL 1.1.3: the layers of `dgl.nn.pytorch.conv`, unmodified,
after `graphshard.dgl.patch_dgl()`. "Exact": outputs, gradients of the inputs and gradients of all
parameters equal those of the same layer on DGL's own graph in one process, to 1e-10 in float64 and
to 2e-5 in float32, relative to the largest number. On a sharded graph: on {ranks} ranks, with
METIS and with random parts. Of the {total} configurations that DGL itself runs here, {works} are
exact on a `Graph` and on shards in one-shot mode, {sequential} in sequential mode.

A batch norm inside a layer takes the statistics of all ranks once
`graphshard.pyg.convert_sync_norm` has been called with the model, as it was here. Where sequential
mode is refused, every rank raises the same error: those layers reduce messages with a function of
their own, which needs all messages of a node at once. `mode="oneshot"` has them.

| layer | `Graph` | `Block` | one-shot | sequential |
| --- | --- | --- | --- | --- |
"""


def row(case: DglLayer) -> str:
    """The line of a layer."""
    if case.fails:
        return f"| {case.name} | not run: {case.fails} | | | |"
    block = "exact" if case.block else "not DGL's either"
    sequential = "refused: its own reduce function" if case.sequential else "exact"
    return f"| {case.name} | exact | {block} | exact | {sequential} |"


def page() -> str:
    """The text of the page."""
    runs = [case for case in zoo() if not case.fails]
    head = HEAD.format(
        ranks=", ".join(map(str, RANKS)),
        works=len(runs),
        total=len(runs),
        sequential=sum(not case.sequential for case in runs),
    )
    return head + "\n".join(map(row, zoo())) + "\n"


def check() -> None:
    """Raise unless every row holds."""
    from test_dgl_layers import check_local, check_sharded

    cases = [case for case in zoo() if not case.fails]
    names = [case.name for case in cases]
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        wrong = check_local(cases, dtype)
        assert not wrong, wrong
        sys.stdout.write(f"one process, {dtype}: holds\n")
        for world_size, cut in itertools.product(RANKS, CUTS):
            wrong = check_sharded(names, world_size, cut, dtype, list(MODES))
            assert not wrong, wrong
            sys.stdout.write(f"{world_size} ranks, {cut}, {dtype}: holds\n")


def main() -> None:
    """Check every row, then write the page."""
    check()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
