# SPDX-License-Identifier: Apache-2.0
"""Arrays of a data set folder, read without pickle and checked: what is wrong is a ValueError.

Features are a dense ``feat.npy``, or a ``feat.npz`` that holds a CSR matrix as the plain arrays
``data``, ``indices``, ``indptr`` and ``shape``; ``scipy.sparse.save_npz`` writes such files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .npy import read_npy, read_npz

_KINDS = {"i": "integers", "f": "real numbers", "b": "bool"}
_ALLOWED = {"i": "iu", "f": "fiu", "b": "b"}
_CSR = {"data": "f", "indices": "i", "indptr": "i", "shape": "i"}
"""The arrays of a CSR matrix and their kinds."""


@dataclass(frozen=True)
class SparseRows:
    """A matrix of which only the non-zeros are stored, row by row (CSR).

    Args:
        data: [num_nonzeros] values.
        indices: [num_nonzeros] column of each value.
        indptr: [num_rows + 1] where each row begins and ends.
        shape: (num_rows, num_columns).
    """

    data: np.ndarray
    indices: np.ndarray
    indptr: np.ndarray
    shape: tuple[int, int]


def read_array(path: Path, ndim: int, kind: str) -> np.ndarray:
    """Read one ``.npy`` file.

    Args:
        path: The file.
        ndim: Number of dimensions it must have.
        kind: ``'i'`` integers (returned as int64), ``'f'`` real numbers, ``'b'`` bool.
    """
    array = read_npy(path)
    if array.ndim != ndim or array.dtype.kind not in _ALLOWED[kind]:
        raise ValueError(
            f"{path} must hold {_KINDS[kind]} in {ndim} dimension(s) (got {array.dtype} "
            f"{array.shape})"
        )
    return plain_numbers(path, array, kind)


def plain_numbers(path: Path, array: np.ndarray, kind: str) -> np.ndarray:
    """An array in this machine's order of bytes and in a dtype that torch has.

    Args:
        path: Where it is from, for errors.
        array: Integers, real numbers or bool.
        kind: As for `read_array`.
    """
    if kind == "i":
        if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"{path} must hold integers below 2^63 (got {array.max()})")
        return array.astype(np.int64, copy=False)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.dtype.itemsize == 8 and array.size and array.max() > 2**53:
            raise ValueError(
                f"{path} must hold real numbers, among which integers beyond 2^53 become others "
                f"(got {array.max()}); store them divided, or as float64"
            )
        return array.astype(np.float64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        return array.astype(np.float64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def read_features(folder: Path, stem: str) -> np.ndarray | SparseRows | None:
    """Read ``{stem}.npy`` (dense) or ``{stem}.npz`` (CSR) of a folder; None if there is neither."""
    if is_there(folder / f"{stem}.npy"):
        return read_array(folder / f"{stem}.npy", 2, "f")
    path = folder / f"{stem}.npz"
    if not is_there(path):
        return None
    archive = read_npz(path, _CSR.__contains__)
    missing = [name for name in _CSR if name not in archive]
    if missing:
        raise ValueError(
            f"{path} must hold the arrays {list(_CSR)} of a CSR matrix (missing: {missing}); "
            "scipy.sparse.save_npz writes them"
        )
    for name, kind in _CSR.items():
        allowed = _ALLOWED[kind] + ("b" if name == "data" else "")
        if archive[name].ndim != 1 or archive[name].dtype.kind not in allowed:
            raise ValueError(
                f"{path} is no CSR matrix: {name} must hold {_KINDS[kind]} in one dimension (got "
                f"{archive[name].dtype} {archive[name].shape})"
            )
    data, indices, indptr, shape = (
        plain_numbers(path, archive[name], kind) for name, kind in _CSR.items()
    )
    if shape.shape != (2,) or indptr.shape != (shape[0] + 1,) or data.shape != indices.shape:
        raise ValueError(
            f"{path} is no CSR matrix: shape {shape.tolist()}, {indptr.shape[0]} row pointers, "
            f"{data.shape[0]} values, {indices.shape[0]} columns"
        )
    ascending = bool((indptr[1:] >= indptr[:-1]).all())
    if not ascending or indptr[0] != 0 or indptr[-1] != len(data):
        raise ValueError(f"{path} is no CSR matrix: indptr must ascend from 0 to {len(data)}")
    if shape[1] < 0 or (indices.size and not 0 <= indices.min() <= indices.max() < shape[1]):
        got = f"{indices.min()} to {indices.max()}" if indices.size else "none"
        raise ValueError(f"{path} is no CSR matrix: columns must be in [0, {shape[1]}) (got {got})")
    return SparseRows(data, indices, indptr, (int(shape[0]), int(shape[1])))


def is_there(path: Path) -> bool:
    """Whether there is anything of this name; that it is a file is checked when it is opened.

    A pipe, a folder or a broken link in place of a file is damage, and no absent file.
    """
    return os.path.lexists(path)


def feature_dtype(features: np.ndarray | SparseRows) -> torch.dtype:
    """The narrowest dtype from float32 up that holds every number of a file as it is.

    That is NumPy's rule: integers of up to 16 bits fit float32, longer ones take float64; real
    numbers keep their dtype, also where it is narrower.

    Raises:
        ValueError: An integer beyond 2^53, which no real number stands for exactly.
    """
    data = features if isinstance(features, np.ndarray) else features.data
    if data.dtype.kind == "f":
        return torch.from_numpy(data[:0]).dtype
    if (
        data.dtype.itemsize == 8
        and data.size
        and max(abs(int(data.min())), int(data.max())) > 2**53
    ):
        raise ValueError(
            f"features are real numbers, and integers beyond 2^53 become others among them (got "
            f"{data.min()} to {data.max()}); pass dtype to have them rounded, or keep ids elsewhere"
        )
    wide = np.promote_types(data.dtype, np.float32)
    return torch.float32 if wide == np.float32 else torch.float64


def dense_features(
    features: np.ndarray | SparseRows, dtype: torch.dtype, row_normalize: bool
) -> Tensor:
    """[num_rows, num_columns] tensor of a feature matrix.

    Args:
        features: What `read_features` returned.
        dtype: Floating point dtype to store.
        row_normalize: Divide each row by its sum; rows that sum to 0 stay as they are.
    """
    if isinstance(features, np.ndarray):
        values = torch.from_numpy(
            features.astype(np.float64 if row_normalize else features.dtype, copy=False)
        )
        if row_normalize:
            values = values * _inverse(values.sum(1)).unsqueeze(1)
        return values.to(dtype)
    counts = torch.from_numpy(np.diff(features.indptr).astype(np.int64))
    rows = torch.repeat_interleave(torch.arange(features.shape[0]), counts)
    values = torch.from_numpy(features.data)
    if row_normalize:
        values = values.double()
        sums = torch.zeros(features.shape[0], dtype=torch.float64).index_add_(0, rows, values)
        values = values * _inverse(sums)[rows]
    columns = torch.from_numpy(features.indices.astype(np.int64))
    dense = torch.zeros(features.shape, dtype=dtype)
    return dense.index_put_((rows, columns), values.to(dtype), accumulate=True)


def _inverse(sums: Tensor) -> Tensor:
    return torch.where(sums == 0, 1.0, 1.0 / torch.where(sums == 0, 1.0, sums))
