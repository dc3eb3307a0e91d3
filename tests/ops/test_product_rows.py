# SPDX-License-Identifier: Apache-2.0
"""Products of rows that stay in files are those of the same rows in memory, by plain torch."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphshard._base import file_rows
from graphshard._base.file_rows import FilePiece, RowsFile, RowsInFiles
from graphshard.ops import BlockwiseRows, affine

WIDTH = 7


def stored(folder: Path, table: Tensor, dtype: torch.dtype) -> RowsInFiles:
    """A table in two pieces of a file, given in another dtype."""
    (folder / "rows").write_bytes(table.contiguous().view(torch.uint8).numpy().tobytes())
    file, row = RowsFile(folder / "rows"), WIDTH * table.element_size()
    half = len(table) // 2
    pieces = FilePiece(file, 0, half), FilePiece(file, half * row, len(table) - half)
    return RowsInFiles(pieces, table.dtype, (WIDTH,), dtype)


def results(x: object, scale: Tensor, matrices: list[Tensor], bias: Tensor) -> list[Tensor]:
    """Everything that layers ask of their input."""
    first, second = matrices
    given = [
        F.linear(x, first.t(), bias),  # type: ignore[arg-type]
        x @ second,  # type: ignore[operator]
        affine([(x, first), (x, second)], bias, relu=True),  # type: ignore[list-item]
        affine([(x * scale, second)], plus=(x @ first)),  # type: ignore[operator]
    ]
    if isinstance(x, BlockwiseRows):
        x = x.with_products([first, second])
    return [*given, torch.cat([x @ second, x @ first], dim=1)]  # type: ignore[operator]


@pytest.mark.parametrize("count", [0, 1, 50])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_and_gradients(
    count: int, beside: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    random = torch.Generator().manual_seed(count)
    table = torch.randn(count, WIDTH, generator=random, dtype=torch.float64)
    width = WIDTH + 2 * beside
    leaves = [torch.randn(width, 3, generator=random) for _ in range(2)]
    leaves = [x.to(dtype) for x in [*leaves, torch.randn(3, generator=random)]]
    leaves.append(torch.randn(count, 2, generator=random).to(dtype))
    scale = torch.rand(count, 1, generator=random).to(dtype)
    found: list[list[Tensor]] = []
    with mock.patch.object(file_rows, "BLOCK_BYTES", 8 * 8 * WIDTH):
        for rows in (BlockwiseRows(stored(tmp_path, table, dtype)), table.to(dtype)):
            first, second, bias, columns = (x.clone().requires_grad_() for x in leaves)
            x = torch.cat([rows, columns], dim=1) if beside else rows  # type: ignore[list-item]
            given = results(x, scale, [first, second], bias)
            sum(each.square().sum() for each in given).backward()  # type: ignore[union-attr]
            grads = [first.grad, second.grad, bias.grad, *([columns.grad] if beside else [])]
            found.append([each.detach() for each in (*given, *grads) if each is not None])
    within = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=within, atol=within * 20)


def test_dropout_draws_the_same_numbers_in_the_backward(tmp_path: Path) -> None:
    table = torch.rand(3000, WIDTH) + 1
    rows = BlockwiseRows(stored(tmp_path, table, torch.float32))
    with mock.patch.object(file_rows, "BLOCK_BYTES", 100 * 4 * WIDTH):
        torch.manual_seed(3)
        dropped = nn.Dropout(0.3)(rows)
        eye = torch.eye(WIDTH, requires_grad=True)
        seen = dropped @ eye
        grad = torch.rand(seen.shape)
        seen.backward(grad)
        again = dropped @ torch.eye(WIDTH)
    assert torch.equal(seen, again)
    kept = seen.detach() != 0
    assert float(kept.float().mean()) == pytest.approx(0.7, abs=0.02)
    torch.testing.assert_close(seen.detach(), torch.where(kept, table / 0.7, 0.0))
    torch.testing.assert_close(eye.grad, seen.detach().t() @ grad, rtol=1e-4, atol=1e-4)
    assert nn.Dropout(0.3).eval()(rows) is rows


def test_autocast_is_that_of_tensors(tmp_path: Path) -> None:
    table, layer = torch.rand(20, WIDTH), nn.Linear(WIDTH, 3)
    rows = BlockwiseRows(stored(tmp_path, table, torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, theirs = layer(rows), layer(table)
    assert mine.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


def test_anything_else_is_refused(tmp_path: Path) -> None:
    rows = BlockwiseRows(stored(tmp_path, torch.rand(4, WIDTH), torch.float32))
    for call in (
        lambda: torch.relu(rows),  # type: ignore[arg-type]
        lambda: rows[1:],
        lambda: rows[:2],
        lambda: rows * 2.0,
        lambda: torch.eye(4) @ rows,  # type: ignore[operator]
        lambda: torch.cat([torch.rand(4, 1), rows], dim=1),  # type: ignore[list-item]
    ):
        with pytest.raises(NotImplementedError, match=r"read for products.*put a linear layer"):
            call()
