# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.backend``, which scripts use to be written for several frameworks: torch's.

Each function is one call of torch under DGL's name and arguments.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

backend_name = "pytorch"
float16, float32, float64 = torch.float16, torch.float32, torch.float64
bfloat16, bool = torch.bfloat16, torch.bool
uint8, int8, int16, int32, int64 = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


def tensor(data: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of numbers, an array, a list or a tensor; one number becomes a row of one."""
    if isinstance(data, int | float):
        data = [data]
    if isinstance(data, list) and data and isinstance(data[0], Tensor):
        data = torch.stack(data)
    return torch.as_tensor(data, dtype=dtype)


def cpu() -> torch.device:
    """The CPU."""
    return torch.device("cpu")


def as_scalar(data: Tensor) -> Any:
    """The only element."""
    return data.item()


def is_tensor(obj: Any) -> builtins.bool:
    """Whether something is a tensor."""
    return isinstance(obj, Tensor)


def shape(input: Tensor) -> torch.Size:
    """Its shape."""
    return input.shape


def dtype(input: Tensor) -> torch.dtype:
    """Its dtype."""
    return input.dtype


def ndim(input: Tensor) -> int:
    """Number of dimensions."""
    return input.dim()


def context(input: Tensor) -> torch.device:
    """Its device."""
    return input.device


def device_type(ctx: Any) -> str:
    """Kind of a device."""
    return torch.device(ctx).type


def device_id(ctx: Any) -> int:
    """Number of a device."""
    return torch.device(ctx).index or 0


def astype(input: Tensor, ty: torch.dtype) -> Tensor:
    """In another dtype."""
    return input.to(ty)


def asnumpy(input: Tensor) -> np.ndarray:
    """As an array."""
    return input.detach().cpu().numpy()


def copy_to(input: Tensor, ctx: Any, **kwargs: Any) -> Tensor:
    """On another device."""
    return input.to(ctx, **kwargs)


def is_pinned(input: Tensor) -> builtins.bool:
    """Whether it is in page-locked memory."""
    return input.is_pinned()


def sum(input: Tensor, dim: int, keepdims: builtins.bool = False) -> Tensor:
    """Sum along a dimension."""
    return input.sum(dim, keepdim=keepdims)


def floor_div(in1: Tensor, in2: Any) -> Tensor:
    """Quotient, rounded down."""
    return in1 // in2


def reduce_sum(input: Tensor) -> Tensor:
    """Sum of all elements."""
    return input.sum()


def cumsum(input: Tensor, dim: int) -> Tensor:
    """Running sums."""
    return input.cumsum(dim)


def mean(input: Tensor, dim: int) -> Tensor:
    """Mean along a dimension."""
    return input.mean(dim)


def reduce_mean(input: Tensor) -> Tensor:
    """Mean of all elements."""
    return input.mean()


def max(input: Tensor, dim: int) -> Tensor:
    """Maximum along a dimension."""
    return input.max(dim).values


def reduce_max(input: Tensor) -> Tensor:
    """Maximum of all elements."""
    return input.max()


def min(input: Tensor, dim: int) -> Tensor:
    """Minimum along a dimension."""
    return input.min(dim).values


def reduce_min(input: Tensor) -> Tensor:
    """Minimum of all elements."""
    return input.min()


def argsort(input: Tensor, dim: int, descending: builtins.bool) -> Tensor:
    """Order along a dimension."""
    return input.argsort(dim, descending)


def topk(input: Tensor, k: int, dim: int, descending: builtins.bool = True) -> Tensor:
    """Largest or smallest elements."""
    return input.topk(k, dim, largest=descending).values


def argtopk(input: Tensor, k: int, dim: int, descending: builtins.bool = True) -> Tensor:
    """Places of the largest or smallest elements."""
    return input.topk(k, dim, largest=descending).indices


def exp(input: Tensor) -> Tensor:
    """Exponentials."""
    return input.exp()


def inverse(input: Tensor) -> Tensor:
    """Inverse matrix."""
    return torch.linalg.inv(input)


def sqrt(input: Tensor) -> Tensor:
    """Square roots."""
    return input.sqrt()


def softmax(input: Tensor, dim: int = -1) -> Tensor:
    """Softmax along a dimension."""
    return input.softmax(dim)


def cat(seq: Sequence[Tensor], dim: int) -> Tensor:
    """One after another."""
    return torch.cat(list(seq), dim)


def stack(seq: Sequence[Tensor], dim: int) -> Tensor:
    """Along a new dimension."""
    return torch.stack(list(seq), dim)


def split(input: Tensor, sizes_or_sections: Any, dim: int) -> tuple[Tensor, ...]:
    """In pieces."""
    return torch.split(input, sizes_or_sections, dim)


def repeat(input: Tensor, repeats: Any, dim: int) -> Tensor:
    """Each element several times."""
    return input.repeat_interleave(repeats, dim)


def gather_row(data: Tensor, row_index: Tensor) -> Tensor:
    """Some rows."""
    return data.index_select(0, row_index.long())


def slice_axis(data: Tensor, axis: int, begin: int, end: int) -> Tensor:
    """A range along a dimension."""
    return data.narrow(axis, begin, end - begin)


def take(data: Tensor, indices: Tensor, dim: int) -> Tensor:
    """Elements along a dimension."""
    return data.index_select(dim, indices.reshape(-1)).reshape(
        *data.shape[:dim], *indices.shape, *data.shape[dim + 1 :]
    )


def narrow_row(x: Tensor, start: int, stop: int) -> Tensor:
    """A range of rows."""
    return x[start:stop]


def scatter_row(data: Tensor, row_index: Tensor, value: Tensor) -> Tensor:
    """A copy with some rows replaced."""
    return data.index_copy(0, row_index.long(), value)


def squeeze(input: Tensor, dim: int) -> Tensor:
    """Without a dimension of size 1."""
    return input.squeeze(dim)


def unsqueeze(input: Tensor, dim: int) -> Tensor:
    """With a dimension of size 1."""
    return input.unsqueeze(dim)


def reshape(input: Tensor, shape: Sequence[int]) -> Tensor:
    """In another shape."""
    return input.reshape(tuple(shape))


def swapaxes(input: Tensor, axis1: int, axis2: int) -> Tensor:
    """With two dimensions exchanged."""
    return input.transpose(axis1, axis2)


def empty(shape: Any, dtype: torch.dtype, ctx: Any) -> Tensor:
    """Without values."""
    return torch.empty(shape, dtype=dtype, device=ctx)


def zeros(shape: Any, dtype: torch.dtype, ctx: Any) -> Tensor:
    """Zeros."""
    return torch.zeros(shape, dtype=dtype, device=ctx)


def zeros_like(input: Tensor) -> Tensor:
    """Zeros of the same form."""
    return torch.zeros_like(input)


def ones(shape: Any, dtype: torch.dtype, ctx: Any) -> Tensor:
    """Ones."""
    return torch.ones(shape, dtype=dtype, device=ctx)


def uniform(shape: Any, dtype: torch.dtype, ctx: Any, low: float, high: float) -> Tensor:
    """Drawn uniformly."""
    return torch.empty(shape, dtype=dtype, device=ctx).uniform_(low, high)


def randint(shape: Any, dtype: torch.dtype, ctx: Any, low: int, high: int) -> Tensor:
    """Integers drawn uniformly."""
    return torch.randint(low, high, shape, dtype=dtype, device=ctx)


def boolean_mask(input: Tensor, mask: Tensor) -> Tensor:
    """The rows where a mask is true."""
    return input[mask.bool()]


def equal(x: Tensor, y: Any) -> Tensor:
    """Where elements are equal."""
    return x == y


def allclose(x: Tensor, y: Tensor, rtol: float = 1e-4, atol: float = 1e-4) -> builtins.bool:
    """Whether all elements are nearly equal."""
    return torch.allclose(x, y, rtol=rtol, atol=atol)


def logical_not(input: Tensor) -> Tensor:
    """Negation."""
    return ~input


def logical_and(input1: Tensor, input2: Tensor) -> Tensor:
    """Conjunction."""
    return input1 & input2


def clone(input: Tensor) -> Tensor:
    """A copy."""
    return input.clone()


def clamp(data: Tensor, min_val: float, max_val: float) -> Tensor:
    """Limited to a range."""
    return data.clamp(min_val, max_val)


def replace_inf_with_zero(x: Tensor) -> Tensor:
    """With 0 where it is infinite."""
    return x.masked_fill(x.isinf(), 0)


def count_nonzero(input: Any) -> int:
    """How many elements are not 0."""
    return int(torch.as_tensor(input).count_nonzero())


def unique(
    input: Tensor, return_inverse: builtins.bool = False, return_counts: builtins.bool = False
) -> Any:
    """Distinct elements, ascending."""
    return torch.unique(input, return_inverse=return_inverse, return_counts=return_counts)


def full_1d(length: int, fill_value: float, dtype: torch.dtype, ctx: Any) -> Tensor:
    """One value several times."""
    return torch.full((length,), fill_value, dtype=dtype, device=ctx)


def nonzero_1d(input: Tensor) -> Tensor:
    """Places of elements that are not 0."""
    return input.nonzero().reshape(-1)


def sort_1d(input: Tensor) -> Any:
    """Values in order, and their places."""
    return input.sort()


def arange(start: int, stop: int, dtype: torch.dtype = torch.int64, ctx: Any = None) -> Tensor:
    """Consecutive integers."""
    return torch.arange(start, stop, dtype=dtype, device=ctx)


def rand_shuffle(arr: Tensor) -> Tensor:
    """In random order."""
    return arr[torch.randperm(len(arr))]


def zerocopy_to_numpy(input: Tensor) -> np.ndarray:
    """As an array that shares memory."""
    return input.detach().cpu().numpy()


def zerocopy_from_numpy(np_array: np.ndarray) -> Tensor:
    """Of an array, sharing memory."""
    return torch.as_tensor(np_array)


__all__ = [
    "allclose",
    "arange",
    "argsort",
    "argtopk",
    "as_scalar",
    "asnumpy",
    "astype",
    "backend_name",
    "bfloat16",
    "bool",
    "boolean_mask",
    "cat",
    "clamp",
    "clone",
    "context",
    "copy_to",
    "count_nonzero",
    "cpu",
    "cumsum",
    "device_id",
    "device_type",
    "dtype",
    "empty",
    "equal",
    "exp",
    "float16",
    "float32",
    "float64",
    "floor_div",
    "full_1d",
    "gather_row",
    "int8",
    "int16",
    "int32",
    "int64",
    "inverse",
    "is_pinned",
    "is_tensor",
    "logical_and",
    "logical_not",
    "max",
    "mean",
    "min",
    "narrow_row",
    "ndim",
    "nonzero_1d",
    "ones",
    "rand_shuffle",
    "randint",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_sum",
    "repeat",
    "replace_inf_with_zero",
    "reshape",
    "scatter_row",
    "shape",
    "slice_axis",
    "softmax",
    "sort_1d",
    "split",
    "sqrt",
    "squeeze",
    "stack",
    "sum",
    "swapaxes",
    "take",
    "tensor",
    "topk",
    "uint8",
    "uniform",
    "unique",
    "unsqueeze",
    "zerocopy_from_numpy",
    "zerocopy_to_numpy",
    "zeros",
    "zeros_like",
]
