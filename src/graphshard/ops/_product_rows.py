# SPDX-License-Identifier: Apache-2.0
"""ProductRows: rows that are asked for nothing but products, so that they need not be in memory.

A first layer multiplies rows of features with matrices that make them narrower, and reads them for
nothing else. What stands for such rows answers ``linear``, ``matmul`` and `affine`, products with a
number for each row, dropout, and further columns beside it; the products are tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._base.file_rows import RowsInFiles
from ._affine import affine
from ._dense import multiply, multiply_transposed

_ABOVE = 1 << 62


class ProductRows:
    """Stands for a matrix ``[num_rows, width]``; a subclass has `product` and what it can do else.

    It answers a tensor's questions about its shape.
    """

    requires_grad = False
    _version = 0

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = torch.Size((num_rows, width)), dtype, device

    def product(self, matrix: Tensor) -> Tensor:
        """``[num_rows, out]``, differentiable, of a matrix ``[width, out]``."""
        raise NotImplementedError

    def with_products(self, matrices: Sequence[Tensor]) -> ProductRows:
        """The same rows, which will be asked for these products, each once."""
        return self

    def scaled(self, factors: Tensor) -> ProductRows:
        """The rows times a number each, ``[num_rows, 1]``, which gets no gradient."""
        raise _refused("a product with a number for each row")

    def dropped_out(self, p: float) -> ProductRows:
        """The rows with numbers set to 0 at random, and the others scaled."""
        raise _refused("dropout")

    def with_columns(self, columns: Tensor) -> ProductRows:
        """The rows with further columns behind theirs, ``[num_rows, n]``."""
        raise _refused("cat")

    def first(self, count: int) -> ProductRows:
        """The first rows."""
        if count == self.shape[0]:
            return self
        raise _refused("a part of the rows")

    def detach(self) -> ProductRows:
        return self

    def is_inference(self) -> bool:
        return False

    def dim(self) -> int:
        return len(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> ProductRows:
        if isinstance(index, slice) and index.start in (None, 0) and index.step in (None, 1):
            return self.first(len(range(*index.indices(self.shape[0]))))
        raise _refused("an index that is no slice of the first rows")

    def __matmul__(self, matrix: Tensor) -> Tensor:
        return self.product(matrix)

    def __mul__(self, factors: Any) -> ProductRows:
        if isinstance(factors, Tensor) and factors.shape == (self.shape[0], 1):
            return self.scaled(factors)
        raise _refused("a product that is none with a number for each row")

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        answer = _ANSWERS.get(getattr(func, "__name__", ""))
        if answer is None:
            raise _refused(getattr(func, "__name__", "this function"))
        return answer(*args, **(kwargs or {}))


def _refused(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"features that stay in files are read for products with matrices (got {what}); put a "
        "linear layer first, or train with features in memory"
    )


def _linear(input: ProductRows, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = input.product(weight.t())
    return rows if bias is None else rows + bias.to(rows.dtype)


def _matmul(rows: ProductRows, matrix: Tensor) -> Tensor:
    if not isinstance(rows, ProductRows):
        raise _refused("a product from the left")
    return rows.product(matrix)


def _affine(
    products: Sequence[tuple[Any, Tensor]],
    bias: Tensor | None = None,
    plus: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    terms = [] if plus is None else [plus]
    terms += [x.product(w) for x, w in products if isinstance(x, ProductRows)]
    others = [(x, w) for x, w in products if not isinstance(x, ProductRows)]
    if others:
        terms.append(affine(others))
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    if bias is not None:
        total = total + bias.to(total.dtype)
    return total.relu() if relu else total


def _times(first: Any, second: Any) -> ProductRows:
    return first * second if isinstance(first, ProductRows) else second * first


def _dropout(
    input: ProductRows, p: float = 0.5, training: bool = True, inplace: bool = False
) -> ProductRows:
    return input.dropped_out(p) if training and p else input


def _cat(tensors: Sequence[Any], dim: int = 0) -> ProductRows:
    rows, *columns = tensors
    if dim not in (1, -1) or not isinstance(rows, ProductRows):
        raise _refused("cat of other things than columns behind them")
    for some in columns:
        rows = rows.with_columns(some)
    return rows


_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "linear": _linear,
    "matmul": _matmul,
    "__matmul__": _matmul,
    "mm": _matmul,
    "affine": _affine,
    "mul": _times,
    "__mul__": _times,
    "__rmul__": _times,
    "dropout": _dropout,
    "cat": _cat,
}


@dataclass(frozen=True)
class _Source:
    """What blocks of rows are made of.

    Args:
        rows: In files, as they are given.
        factors: ``[num_rows, 1]`` of each row, or None.
        drop: Probability of dropout, 0 for none.
        seed: Of its random numbers, which are the same at each reading.
    """

    rows: RowsInFiles
    factors: Tensor | None = None
    drop: float = 0.0
    seed: int = 0

    def blocks(
        self, beside: Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Some rows after others: which, the rows, and factors of their numbers, if any."""
        start = 0
        for number, block in enumerate(self.rows.blocks()):
            places = slice(start, start + block.shape[0])
            start = places.stop
            if beside is not None:
                block = torch.cat([block, beside[places].to(block)], dim=1)
            mask = None
            if self.drop:
                random = torch.Generator().manual_seed((self.seed + number) % _ABOVE)
                mask = torch.empty(block.shape).bernoulli_(1 - self.drop, generator=random)
                mask = mask.div_(1 - self.drop).to(block.dtype)
            if self.factors is not None:
                of_rows = self.factors[places].to("cpu", block.dtype)
                mask = of_rows if mask is None else mask.mul_(of_rows)
            block = block if mask is None else block.mul_(mask)
            yield places, block.to(device, dtype), None if mask is None else mask.to(device, dtype)


class BlockwiseRows(ProductRows):
    """Rows of features in files, which are read a block at a time, in their order.

    A product reads them once, and so does the gradient of its matrix; products that are announced
    by `with_products` are read together. Dropout draws numbers block by block, which are others
    than those of the same rows in memory.

    Args:
        rows: In files; given in the dtype of the network.
        device: Where products are computed.
        beside: Further columns ``[num_rows, n]``, in memory, which get gradients.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> from graphshard._base.file_rows import FilePiece, RowsFile
        >>> path = Path(mkdtemp()) / "rows"
        >>> _ = path.write_bytes(torch.ones(4, 3).numpy().tobytes())
        >>> piece = FilePiece(RowsFile(path), 0, 4)
        >>> rows = BlockwiseRows(RowsInFiles((piece,), torch.float32, (3,), torch.float32))
        >>> torch.nn.functional.linear(rows, torch.ones(2, 3))[0]
        tensor([3., 3.])
    """

    def __init__(
        self,
        rows: RowsInFiles,
        device: torch.device | str = "cpu",
        beside: Tensor | None = None,
    ) -> None:
        count, width = rows.shape
        width += 0 if beside is None else beside.shape[1]
        super().__init__(count, width, rows.dtype, torch.device(device))
        self._source, self._beside = _Source(rows), beside
        self._ready: dict[tuple[Any, ...], Tensor] = {}

    def _with(self, source: _Source) -> BlockwiseRows:
        new = BlockwiseRows(source.rows, self.device, self._beside)
        new._source = source
        return new

    def product(self, matrix: Tensor) -> Tensor:
        ready = self._ready.pop(place_of(matrix), None)
        return self._products([matrix])[0] if ready is None else ready

    def with_products(self, matrices: Sequence[Tensor]) -> BlockwiseRows:
        new = self._with(self._source)
        places = map(place_of, matrices)
        new._ready = dict(zip(places, self._products(matrices), strict=True))
        return new

    def _products(self, matrices: Sequence[Tensor]) -> Sequence[Tensor]:
        dtype = self.dtype
        if torch.is_autocast_enabled(self.device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(self.device.type)
        results: Sequence[Tensor] = _BlockwiseProducts.apply(
            self._source, self._beside, *(matrix.to(dtype) for matrix in matrices)
        )
        return results

    def scaled(self, factors: Tensor) -> BlockwiseRows:
        before = self._source.factors
        factors = factors.detach() if before is None else before * factors.detach()
        return self._with(replace(self._source, factors=factors))

    def dropped_out(self, p: float) -> BlockwiseRows:
        if self._source.drop:
            raise _refused("dropout twice")
        seed = int(torch.randint(_ABOVE, ()))
        return self._with(replace(self._source, drop=p, seed=seed))

    def with_columns(self, columns: Tensor) -> BlockwiseRows:
        if self._source.drop or self._source.factors is not None:
            raise _refused("columns behind rows that have changed")
        beside = columns if self._beside is None else torch.cat([self._beside, columns], dim=1)
        return BlockwiseRows(self._source.rows, self.device, beside)


def place_of(matrix: Tensor) -> tuple[Any, ...]:
    """What two views of one matrix have in common."""
    return matrix.data_ptr(), matrix.shape, matrix.stride()


class _BlockwiseProducts(Function):
    """Rows of a `_Source` times each of some matrices, block by block."""

    @staticmethod
    def forward(
        ctx: Any, source: _Source, beside: Tensor | None, *matrices: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.source = source
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(beside, *matrices)
        first, count = matrices[0], source.rows.shape[0]
        results = tuple(matrix.new_empty(count, matrix.shape[1]) for matrix in matrices)
        for places, block, _ in source.blocks(beside, first.device, first.dtype):
            for matrix, result in zip(matrices, results, strict=True):
                multiply([(block, matrix)], out=result[places])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        beside, *matrices = ctx.saved_tensors
        source: _Source = ctx.source
        first = matrices[0]
        wide = torch.promote_types(first.dtype, torch.float32)
        of_matrices = [torch.zeros(m.shape, dtype=wide, device=m.device) for m in matrices]
        of_beside = None if beside is None else torch.zeros_like(beside)
        for places, block, mask in source.blocks(beside, first.device, first.dtype):
            for matrix, grad, total in zip(matrices, grads, of_matrices, strict=True):
                if grad is None:
                    continue
                total += multiply_transposed(block, grad[places])
                if of_beside is not None:
                    width = of_beside.shape[1]
                    columns = grad[places] @ matrix[matrix.shape[0] - width :].t()
                    if mask is not None:
                        columns *= mask if mask.shape[1] == 1 else mask[:, -width:]
                    of_beside[places] += columns.to(of_beside)
        return None, of_beside, *(total.to(first.dtype) for total in of_matrices)
