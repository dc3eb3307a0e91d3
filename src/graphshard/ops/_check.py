# SPDX-License-Identifier: Apache-2.0
"""What a caller may pass, checked once at the public edge: each message has rule, value, cure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor

from .._base.typing import INDEX_DTYPES

Operand = Tensor | None
"""What an operator reads, None where it does not."""

VALUE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""float16 runs in plain torch; the others have compiled kernels."""

MOST = 2**63 - 1
"""One less than the numbers that 64 bits with a sign can tell apart, as torch.Size has them."""


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)} (got {value!r})")


def check_tensor(name: str, value: object) -> Tensor:
    """Raise TypeError unless ``value`` is a tensor whose entries lie in memory, one by one."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor (got {type(value).__name__}); use torch.as_tensor"
        )
    if value.layout != torch.strided or value.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor (got one of layout {value.layout}); use .to_dense()"
        )
    if value.is_quantized:
        raise TypeError(f"{name} must not be quantized (got {value.dtype}); use .dequantize()")
    return value


def check_count(name: str, count: int) -> None:
    """Raise unless ``count`` is a number of things that 64 bits can count."""
    if isinstance(count, bool) or not hasattr(type(count), "__index__"):
        raise TypeError(f"{name} must be an int (got {count!r}); use int(...)")
    if count < 0:
        raise ValueError(f"{name} must not be negative (got {count})")
    if count >= MOST:
        raise ValueError(f"{name} must be below 2^63 - 1 (got {count})")


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False (got {value!r}); use bool(...)")


def check_number(name: str, value: object) -> None:
    """Raise unless ``value`` is a number that float32 can hold; NaN and infinities are."""
    if not hasattr(type(value), "__float__") or isinstance(value, Tensor):
        raise TypeError(f"{name} must be a number (got {value!r}); use float(...)")
    most = torch.finfo(torch.float32).max
    if most < abs(cast(float, value)) < math.inf:
        raise ValueError(f"{name} must be in the range of float32, up to {most} (got {value})")


def check_result(
    name: str, value: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Raise unless ``value`` is a tensor exactly like a result that was described."""
    value = check_tensor(name, value)
    if tuple(value.shape) != tuple(shape) or value.device != device:
        raise ValueError(
            f"{name} must have shape {tuple(shape)} on {device} (got {tuple(value.shape)} on "
            f"{value.device}); pass what the operator returned, or something like it"
        )
    if value.dtype != dtype:
        raise TypeError(f"{name} must be {dtype} (got {value.dtype}); convert it with .to({dtype})")
    return value


def check_written(name: str, out: Tensor) -> None:
    """Raise ValueError if two entries of ``out``, which is written to, are one in memory."""
    if out.is_contiguous():
        return
    by_step = sorted(zip(out.stride(), out.shape, strict=True))
    reach = 0
    for step, size in by_step:
        if size > 1 and step <= reach and out.numel():
            raise ValueError(
                f"entries of {name} must not share memory with each other (got shape "
                f"{tuple(out.shape)} and strides {tuple(out.stride())}); pass {name}.clone()"
            )
        reach += step * (size - 1)


def dense(tensor: Tensor) -> Tensor:
    """As kernels read it: without gaps, its numbers in memory, where a view may have the negative.

    Such views come from ``torch.real`` and ``torch.imag`` of conjugates.
    """
    return tensor.resolve_neg().contiguous()


def is_plain(out: Tensor) -> bool:
    """Whether the kernels may write to ``out``: its memory holds what it says, and is aligned."""
    size = out.element_size()
    return not out.is_neg() and not out.is_conj() and out.data_ptr() % size == 0


def share_memory(first: Tensor, second: Tensor) -> bool:
    """Whether the stretches of memory from first to last entry of two tensors overlap."""
    if first.device != second.device or not first.numel() or not second.numel():
        return False
    begins, ends = [], []
    for tensor in (first, second):
        reach = tensor.numel() - 1
        if not tensor.is_contiguous():
            steps = zip(tensor.stride(), tensor.shape, strict=True)
            reach = sum(step * (size - 1) for step, size in steps)
        begins.append(tensor.data_ptr())
        ends.append(tensor.data_ptr() + (reach + 1) * tensor.element_size())
    return begins[0] < ends[1] and begins[1] < ends[0]


def apart(value: Tensor, *written: Tensor) -> Tensor:
    """``value``, or a copy of it where one of the tensors that are written shares its memory."""
    return value.clone() if any(share_memory(value, out) for out in written) else value


def check_operand(
    operator: str,
    op: str,
    name: str,
    value: Tensor | None,
    count_name: str,
    count: int,
    device: torch.device,
) -> Tensor:
    """Raise unless ``value`` has ``count`` rows on ``device``, and numbers that ``op`` accepts."""
    if value is None:
        raise ValueError(f"{operator} with op {op!r} needs {name} (got None); pass a tensor")
    check_tensor(f"{name} of {operator}", value)
    if value.dim() == 0 or value.shape[0] != count:
        raise ValueError(
            f"{name} of {operator} must have {count_name} = {count} rows "
            f"(got shape {tuple(value.shape)}); pass one row per "
            f"{'edge' if count_name == 'num_edges' else 'node'} of this adjacency"
        )
    if value.device != device:
        raise ValueError(
            f"{name} of {operator} must be on the device of the adjacency, {device} "
            f"(got {value.device}); move one of them with .to(...)"
        )
    copies = operator == "gsddmm" and op in ("copy_lhs", "copy_rhs")
    if value.dtype not in VALUE_DTYPES and not copies:
        raise TypeError(
            f"{name} of {operator} must be float32, float64, bfloat16 or float16 "
            f"(got {value.dtype}); convert it with .float()"
        )
    return value


def check_broadcast(op: str, lhs: Tensor, rhs: Tensor) -> None:
    """Raise ValueError unless the shapes of one row of each operand broadcast together."""
    for first, second in zip(reversed(lhs.shape[1:]), reversed(rhs.shape[1:]), strict=False):
        if first != second and 1 not in (first, second):
            raise ValueError(
                f"{op} broadcasts the dimensions after the first from the right: equal, or one of "
                f"them 1 (got lhs {tuple(lhs.shape)} and rhs {tuple(rhs.shape)}); insert "
                "dimensions of size 1 with unsqueeze"
            )


def check_index_array(name: str, array: Tensor) -> None:
    """Raise unless ``array`` is a one-dimensional int32 or int64 tensor with contents."""
    check_tensor(name, array)
    if array.is_meta:
        raise ValueError(f"{name} must hold numbers (got a tensor on the device meta)")
    if array.dtype not in INDEX_DTYPES:
        raise TypeError(
            f"{name} must be int32 or int64 (got {array.dtype}); convert with .to(torch.int64)"
        )
    if array.dim() != 1:
        raise ValueError(
            f"{name} must have one dimension (got shape {tuple(array.shape)}); flatten it"
        )


def outside(ids: Tensor, count: int) -> int | None:
    """An id that is not in [0, count): the lowest if it is negative, else the highest."""
    if ids.numel() == 0:
        return None
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0:
        return low
    return high if high >= count else None


def check_ids(name: str, array: Tensor, count_name: str, count: int) -> None:
    """Raise unless ``array`` holds ids from 0 up to but not including ``count``."""
    check_index_array(name, array)
    check_count(count_name, count)
    if array.dtype == torch.int32:
        check_fits_int32(count_name, count)
        check_fits_int32("num_edges", array.numel())
    if (bad := outside(array, count)) is not None:
        raise ValueError(
            f"every id in {name} must be in [0, {count_name}={count}) "
            f"(got {bad}); raise {count_name} or drop the edge"
        )


def check_alike(first_name: str, first: Tensor, second_name: str, second: Tensor) -> None:
    """Raise unless both arrays have one dtype and one device."""
    if first.dtype != second.dtype:
        raise TypeError(
            f"{first_name} and {second_name} must have one dtype "
            f"(got {first.dtype} and {second.dtype}); convert one with .to(...)"
        )
    if first.device != second.device:
        raise ValueError(
            f"{first_name} and {second_name} must be on one device "
            f"(got {first.device} and {second.device}); move one with .to(...)"
        )


def check_csc(
    indptr: Tensor, indices: Tensor, eids: Tensor | None, num_src: int, num_dst: int
) -> None:
    """Raise unless the arrays are in-edges of ``num_dst`` nodes grouped by destination."""
    check_index_array("indptr", indptr)
    check_count("num_dst", num_dst)
    check_ids("indices", indices, "num_src", num_src)
    check_alike("indptr", indptr, "indices", indices)
    num_edges = indices.shape[0]
    if indptr.shape[0] != num_dst + 1:
        raise ValueError(
            f"indptr must have num_dst + 1 = {num_dst + 1} entries (got {indptr.shape[0]})"
        )
    ends = int(indptr[0]), int(indptr[-1])
    if ends != (0, num_edges) or bool((indptr[1:] < indptr[:-1]).any()):
        raise ValueError(
            f"indptr must ascend from 0 to len(indices) = {num_edges} "
            f"(it runs from {ends[0]} to {ends[1]}); build it from in-degrees with cumsum"
        )
    if eids is None:
        return
    check_ids("eids", eids, "num_edges", num_edges)
    check_alike("indptr", indptr, "eids", eids)
    if eids.shape != indices.shape or bool((torch.bincount(eids, minlength=num_edges) != 1).any()):
        raise ValueError(
            f"eids must hold every id from 0 to {num_edges - 1} once (got {eids.numel()} ids, "
            "some repeated or missing); pass None where position is the id"
        )


def check_fits_int32(name: str, count: int) -> None:
    """Raise ValueError unless ``count`` ids can be told apart in 32 bits."""
    if count >= 2**31:
        raise ValueError(f"{name} must fit in 32 bits (got {count}); use idtype torch.int64")


def check_narrows(name: str, array: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless ``dtype``, an integer type, can hold every number of ``array``."""
    if dtype != torch.int32 or array.dtype == torch.int32 or array.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(array))
    if low < -(2**31) or high >= 2**31:
        raise ValueError(f"{name} must fit in 32 bits (got {low} to {high}); ask for torch.int64")


def check_places(name: str, places: Tensor, count: int) -> None:
    """Raise IndexError unless ``places`` are rows of a table of ``count`` rows."""
    if (bad := outside(places, count)) is not None:
        raise IndexError(
            f"every number in {name} must be a row of a table of {count} rows (got {bad})"
        )
