# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.backend``, for scripts that were written for several frameworks: torch's.

Where torch has a function that takes DGL's arguments, the name is that function.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import dlpack

from .._base.typing import Device

backend_name = "pytorch"

float16, float32, float64, bfloat16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
uint8, int8, int16, int32, int64 = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
bool = torch.bool

cat, stack, split, repeat = torch.cat, torch.stack, torch.split, torch.repeat_interleave
reshape, squeeze, unsqueeze = torch.reshape, torch.squeeze, torch.unsqueeze
swapaxes, clone, zeros_like = torch.transpose, torch.clone, torch.zeros_like
exp, sqrt, inverse, softmax = torch.exp, torch.sqrt, torch.inverse, torch.softmax
clamp = torch.clamp
equal, floor_div = torch.eq, torch.floor_divide
logical_and, logical_not = torch.logical_and, torch.logical_not
sum, mean, cumsum = torch.sum, torch.mean, torch.cumsum
reduce_sum, reduce_mean, reduce_max, reduce_min = torch.sum, torch.mean, torch.max, torch.min
argsort, sort_1d, unique = torch.argsort, torch.sort, torch.unique
is_tensor, is_recording = torch.is_tensor, torch.is_grad_enabled
no_grad = torch.no_grad
zerocopy_from_dlpack, zerocopy_to_dlpack = dlpack.from_dlpack, dlpack.to_dlpack

data_type_dict = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (bfloat16, float16, float32, float64, uint8, int8, int16, int32, int64, bool)
}
"""Name of a dtype -> the dtype."""
reverse_data_type_dict = {dtype: name for name, dtype in data_type_dict.items()}
"""A dtype -> its name."""

# ------------------------------------------------------------------ what a tensor is


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


def device_type(ctx: Device) -> str:
    """Kind of a device."""
    return torch.device(ctx).type


def device_id(ctx: Device) -> int:
    """Number of a device."""
    return torch.device(ctx).index or 0


def astype(input: Tensor, ty: torch.dtype) -> Tensor:
    """In another dtype."""
    return input.to(ty)


def asnumpy(input: Tensor) -> np.ndarray:
    """As an array, which shares memory where it can."""
    return input.detach().cpu().numpy()


zerocopy_to_numpy = asnumpy
zerocopy_from_numpy = torch.as_tensor


def copy_to(input: Tensor, ctx: Device, **kwargs: Any) -> Tensor:
    """On another device."""
    return input.to(ctx, **kwargs)


def is_pinned(input: Tensor) -> builtins.bool:
    """Whether it is in page-locked memory."""
    return input.is_pinned()


# ------------------------------------------------------------------ reductions and order


def max(input: Tensor, dim: int) -> Tensor:
    """Maximum along a dimension."""
    return input.max(dim).values


def min(input: Tensor, dim: int) -> Tensor:
    """Minimum along a dimension."""
    return input.min(dim).values


def topk(input: Tensor, k: int, dim: int, descending: builtins.bool = True) -> Tensor:
    """Largest or smallest elements."""
    return input.topk(k, dim, largest=descending).values


def argtopk(input: Tensor, k: int, dim: int, descending: builtins.bool = True) -> Tensor:
    """Places of the largest or smallest elements."""
    return input.topk(k, dim, largest=descending).indices


def count_nonzero(input: Any) -> int:
    """How many elements are not 0."""
    return int(torch.as_tensor(input).count_nonzero())


def nonzero_1d(input: Tensor) -> Tensor:
    """Places of elements that are not 0."""
    return input.nonzero().reshape(-1)


def allclose(x: Tensor, y: Tensor, rtol: float = 1e-4, atol: float = 1e-4) -> builtins.bool:
    """Whether all elements are nearly equal."""
    return torch.allclose(x, y, rtol=rtol, atol=atol)


def replace_inf_with_zero(x: Tensor) -> Tensor:
    """With 0 where it is infinite."""
    return x.masked_fill(x.isinf(), 0)


# ------------------------------------------------------------------ rows


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


def boolean_mask(input: Tensor, mask: Tensor) -> Tensor:
    """The rows where a mask is true."""
    return input[mask.bool()]


def scatter_row(data: Tensor, row_index: Tensor, value: Tensor) -> Tensor:
    """A copy with some rows replaced."""
    return data.index_copy(0, row_index.long(), value)


def scatter_row_inplace(data: Tensor, row_index: Tensor, value: Tensor) -> None:
    """Replace some rows."""
    data[row_index.long()] = value


def scatter_add(x: Tensor, idx: Tensor, m: int) -> Tensor:
    """The sum of the rows of each number from 0 to ``m - 1``."""
    return x.new_zeros(m, *x.shape[1:]).index_add(0, idx.long(), x)


def index_add_inplace(data: Tensor, row_idx: Tensor, value: Tensor) -> None:
    """Add to some rows."""
    data.index_add_(0, row_idx.long(), value)


def pad_packed_tensor(
    input: Tensor, lengths: Any, value: float, l_min: int | None = None
) -> Tensor:
    """Runs of rows as one batch, ``[num_runs, longest, ...]``, filled up with ``value``."""
    runs = input.split([int(length) for length in lengths])
    longest = builtins.max([l_min or 0, *(len(run) for run in runs)])
    padded = input.new_full((len(runs), longest, *input.shape[1:]), value)
    for rows, run in zip(padded, runs, strict=True):
        rows[: len(run)] = run
    return padded


def pack_padded_tensor(input: Tensor, lengths: Iterable[Any]) -> Tensor:
    """The rows of a batch without what filled it up; undoes `pad_packed_tensor`."""
    return torch.cat([rows[: int(n)] for rows, n in zip(input, lengths, strict=True)])


def rand_shuffle(arr: Tensor) -> Tensor:
    """In random order."""
    return arr[torch.randperm(len(arr))]


# ------------------------------------------------------------------ new tensors


def empty(shape: Sequence[int], dtype: torch.dtype, ctx: Device) -> Tensor:
    """Without values."""
    return torch.empty(shape, dtype=dtype, device=ctx)


def zeros(shape: Sequence[int], dtype: torch.dtype, ctx: Device) -> Tensor:
    """Zeros."""
    return torch.zeros(shape, dtype=dtype, device=ctx)


def ones(shape: Sequence[int], dtype: torch.dtype, ctx: Device) -> Tensor:
    """Ones."""
    return torch.ones(shape, dtype=dtype, device=ctx)


def full_1d(length: int, fill_value: float, dtype: torch.dtype, ctx: Device) -> Tensor:
    """One value several times."""
    return torch.full((length,), fill_value, dtype=dtype, device=ctx)


def arange(start: int, stop: int, dtype: torch.dtype = int64, ctx: Device | None = None) -> Tensor:
    """Consecutive integers."""
    return torch.arange(start, stop, dtype=dtype, device=ctx)


def uniform(
    shape: Sequence[int], dtype: torch.dtype, ctx: Device, low: float, high: float
) -> Tensor:
    """Drawn uniformly."""
    return torch.empty(shape, dtype=dtype, device=ctx).uniform_(low, high)


def randint(shape: Sequence[int], dtype: torch.dtype, ctx: Device, low: int, high: int) -> Tensor:
    """Integers drawn uniformly."""
    return torch.randint(low, high, shape, dtype=dtype, device=ctx)


# ------------------------------------------------------------------ gradients


def attach_grad(x: Tensor) -> Tensor:
    """Record what is computed from it, with a gradient of 0 so far."""
    if x.grad is None:
        return x.requires_grad_()
    x.grad.zero_()
    return x


def backward(x: Tensor, head_gradient: Tensor | None = None) -> None:
    """Compute gradients; a head gradient of one element is that of a single number."""
    if head_gradient is not None and head_gradient.shape == (1,) and x.dim() == 0:
        head_gradient = head_gradient[0]
    x.backward(head_gradient)


def grad(x: Tensor) -> Tensor | None:
    """Its gradient."""
    return x.grad


def is_no_grad(x: Tensor) -> builtins.bool:
    """Whether its gradient is 0, or has not been computed."""
    return x.grad is None or not x.grad.any()


def record_grad() -> AbstractContextManager[None]:
    """A context in which torch records gradients, as it does outside."""
    return nullcontext()


def sync() -> None:
    """Wait for the devices; torch waits where a value is read."""


__all__ = """
    allclose arange argsort argtopk as_scalar asnumpy astype attach_grad backend_name
    backward bfloat16 bool boolean_mask cat clamp clone context copy_to count_nonzero cpu
    cumsum data_type_dict device_id device_type dtype empty equal exp float16 float32
    float64 floor_div full_1d gather_row grad index_add_inplace int16 int32 int64 int8
    inverse is_no_grad is_pinned is_recording is_tensor logical_and logical_not max mean min
    narrow_row ndim no_grad nonzero_1d ones pack_padded_tensor pad_packed_tensor
    rand_shuffle randint record_grad reduce_max reduce_mean reduce_min reduce_sum repeat
    replace_inf_with_zero reshape reverse_data_type_dict scatter_add scatter_row
    scatter_row_inplace shape slice_axis softmax sort_1d split sqrt squeeze stack sum
    swapaxes sync take tensor topk uint8 uniform unique unsqueeze zerocopy_from_dlpack
    zerocopy_from_numpy zerocopy_to_dlpack zerocopy_to_numpy zeros zeros_like
""".split()
