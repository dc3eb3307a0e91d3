# SPDX-License-Identifier: Apache-2.0
"""Ids from a user's hands: into checked tensors, or into an error that says what is wrong.

What is no integer, or no id type, is a TypeError; what does not fit the graph is a ValueError.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..._base.typing import INDEX_DTYPES
from ...errors import GraphTypeError, GraphValueError

_MAX_INT32 = 2**31 - 1


def check_idtype(idtype: Any) -> torch.dtype:
    """Return ``idtype`` if ids can have it."""
    if idtype not in INDEX_DTYPES:
        raise GraphTypeError(f"idtype must be torch.int32 or torch.int64 (got {idtype!r})")
    chosen: torch.dtype = idtype
    return chosen


def as_integers(ids: Any, what: str) -> Tensor:
    """A one-dimensional integer tensor from a tensor, an array, a sequence or one number.

    Tensors keep dtype and device if they are int32 or int64; other integers become int64.
    """
    if isinstance(ids, Tensor):
        tensor = ids
    else:
        if not hasattr(ids, "__array__") and hasattr(ids, "__iter__"):
            ids = list(ids)
        try:
            # A copy, so that a graph never changes with an array that a caller reuses.
            tensor = torch.tensor(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise GraphTypeError(
                f"{what} must be integers in a tensor, an array or a flat list (got "
                f"{type(ids).__name__}: {error})"
            ) from None
        if tensor.numel() == 0 and isinstance(ids, list):
            tensor = torch.empty(0, dtype=torch.int64)
    if tensor.dtype == torch.bool:
        raise GraphTypeError(
            f"{what} must be integers, not a mask of bools; give mask.nonzero().squeeze(1)"
        )
    if tensor.is_floating_point() or tensor.is_complex():
        raise GraphTypeError(f"{what} must be integers (got {tensor.dtype}); convert with .long()")
    if tensor.dim() > 1:
        raise GraphValueError(f"{what} must have one dimension (got shape {tuple(tensor.shape)})")
    tensor = tensor.reshape(-1)
    return tensor if tensor.dtype in INDEX_DTYPES else tensor.long()


def id_tensor(ids: Any, what: str, idtype: torch.dtype, device: torch.device) -> Tensor:
    """Ids as a graph of ``idtype`` on ``device`` uses them; a tensor must match already."""
    tensor = as_integers(ids, what)
    if not isinstance(ids, Tensor):
        return tensor.to(device=device, dtype=idtype)
    if tensor.dtype != idtype:
        raise GraphValueError(
            f"{what} must have the graph's idtype {idtype} (got {tensor.dtype}); convert them "
            f"with .to({idtype}), or the graph with .int() or .long()"
        )
    if tensor.device != device:
        raise GraphValueError(
            f"{what} must be on the graph's device {device} (got {tensor.device}); move either "
            f"with .to(device)"
        )
    return tensor


def check_ids(ids: Tensor, stop: int, what: str, of: str) -> None:
    """Raise unless every id is in ``[0, stop)``.

    Args:
        ids: Any number of ids.
        stop: How many there are.
        what: An id of what ("a node id").
        of: What there are ``stop`` of ("nodes of type 'user'").
    """
    if ids.numel() == 0:
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= stop:
        raise GraphValueError(
            f"{what} must be in [0, {stop}) because there are {stop} {of} (got "
            f"{low if low < 0 else high})"
        )


def by_first_occurrence(ids: Tensor) -> Tensor:
    """The distinct ids, in the order in which they first occur."""
    distinct, group = torch.unique(ids, return_inverse=True)
    first = torch.full(distinct.shape, ids.shape[0], dtype=torch.int64, device=ids.device)
    position = torch.arange(ids.shape[0], device=ids.device)
    first.scatter_reduce_(0, group, position, "amin")
    return distinct[first.argsort()]


def places_of(ids: Tensor, count: int, which: Literal["first", "last"] = "first") -> Tensor:
    """``[count]`` place of each id in ``ids``, the first or the last of several; -1 if none."""
    positions = torch.arange(ids.shape[0], dtype=ids.dtype, device=ids.device)
    if which == "last":
        places = torch.full((count,), -1, dtype=ids.dtype, device=ids.device)
        return places.scatter_reduce_(0, ids.long(), positions, "amax")
    places = torch.full((count,), ids.shape[0], dtype=ids.dtype, device=ids.device)
    places.scatter_reduce_(0, ids.long(), positions, "amin")
    return places.masked_fill_(places == ids.shape[0], -1)


def check_fits(count: int, idtype: torch.dtype, what: str) -> None:
    """Raise where ids of ``count`` things do not fit in ``idtype``."""
    if idtype == torch.int32 and count > _MAX_INT32:
        raise GraphValueError(
            f"int32 ids reach {_MAX_INT32} (got {count} {what}); use idtype=torch.int64"
        )
