# SPDX-License-Identifier: Apache-2.0
"""Names of ``dgl.data.utils``: DGL's binary files without DGL, and small things for data sets.

``save_info`` and ``load_info`` write and read JSON, where DGL pickles: reading a pickle runs what
is in it. A file that DGL wrote is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._base.files import read_json_regular, write_json
from ...errors import GraphTypeError, GraphValueError
from ...graph import load_graphs, load_labels, load_tensors, save_graphs, save_tensors

__all__ = [
    "Subset",
    "generate_mask_tensor",
    "idx2mask",
    "load_graphs",
    "load_info",
    "load_labels",
    "load_tensors",
    "makedirs",
    "save_graphs",
    "save_info",
    "save_tensors",
    "split_dataset",
]


def save_info(path: str | os.PathLike[str], info: Mapping[str, Any]) -> None:
    """Write a dictionary of plain values as JSON.

    Args:
        path: The file.
        info: Numbers, strings, None, and lists and dictionaries of those.

    Raises:
        TypeError: Another value; save tensors with `save_tensors`.
    """
    try:
        json.dumps(info, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise GraphTypeError(
            f"info must be made of numbers, strings, lists and dictionaries ({error}); save "
            "tensors with save_tensors"
        ) from None
    write_json(Path(path), dict(info))


def load_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `save_info` wrote.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is no JSON, as where DGL wrote it.
    """
    try:
        found = read_json_regular(path)
    except ValueError as error:
        raise GraphValueError(
            f"{os.fspath(path)} is not the JSON that save_info writes ({error}); DGL's are pickles,"
            " which are not read: save it again"
        ) from None
    if not isinstance(found, dict):
        raise GraphValueError(f"{os.fspath(path)} holds no dictionary")
    return found


class Subset:
    """Some items of a data set.

    Args:
        dataset: The data set.
        indices: Which items.
    """

    def __init__(self, dataset: Any, indices: Any) -> None:
        self.dataset, self.indices = dataset, indices

    def __getitem__(self, item: int) -> Any:
        """The item of that place among the indices."""
        return self.dataset[self.indices[item]]

    def __len__(self) -> int:
        """Number of items."""
        return len(self.indices)


def split_dataset(
    dataset: Any,
    frac_list: Sequence[float] | None = None,
    shuffle: bool = False,
    random_state: int | None = None,
) -> list[Subset]:
    """Split a data set into parts.

    Args:
        dataset: What has ``__len__`` and ``__getitem__``.
        frac_list: Share of each part, together 1; by default 0.8, 0.1 and 0.1. The last part has
            what remains.
        shuffle: Whether to take items in random order.
        random_state: Seed of that order; None takes one of NumPy's.

    Raises:
        ValueError: The shares are not together 1.

    Example:
        >>> [len(part) for part in split_dataset(range(10), [0.5, 0.3, 0.2])]
        [5, 3, 2]
    """
    shares = np.asarray([0.8, 0.1, 0.1] if frac_list is None else frac_list, dtype=float)
    if not np.allclose(shares.sum(), 1.0):
        raise GraphValueError(f"frac_list must be together 1 (got {shares.sum():.4f})")
    sizes = (len(dataset) * shares).astype(int)
    sizes[-1] = len(dataset) - sizes[:-1].sum()
    order = np.arange(len(dataset))
    if shuffle:
        order = np.random.RandomState(random_state).permutation(len(dataset))
    stops = sizes.cumsum()
    return [
        Subset(dataset, order[stop - size : stop]) for stop, size in zip(stops, sizes, strict=True)
    ]


def idx2mask(idx: Any, len: int) -> np.ndarray:
    """An array of zeros with ones at some places.

    Args:
        idx: The places.
        len: Its length.
    """
    mask = np.zeros(len)
    mask[idx] = 1
    return mask


def generate_mask_tensor(mask: np.ndarray) -> Tensor:
    """A bool tensor of an array.

    Args:
        mask: The array.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(mask, np.ndarray):
        raise GraphTypeError(f"mask must be a NumPy array (got {type(mask).__name__})")
    return torch.from_numpy(mask.astype(bool))


def makedirs(path: str | os.PathLike[str]) -> None:
    """Make a folder and those above it, where they are not there.

    Args:
        path: The folder.
    """
    os.makedirs(os.path.expanduser(os.path.normpath(path)), exist_ok=True)
