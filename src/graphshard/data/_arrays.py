# SPDX-License-Identifier: Apache-2.0
"""Arrays of a data set folder, read without pickle and checked at the door.

Features are a dense ``feat.npy``, or a ``feat.npz`` that holds a CSR matrix as the plain arrays
``data``, ``indices``, ``indptr`` and ``shape``; ``scipy.sparse.save_npz`` writes such files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_KINDS = {"i": "integers", "f": "real numbers", "b": "bool"}


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

    Raises:
        ValueError: It is no such array, or would need pickle to be read.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} cannot be read as a plain array ({error}); write it with numpy.save from a "
            "numeric array"
        ) from error
    allowed = {"i": "iu", "f": "fiu", "b": "b"}[kind]
    if not isinstance(array, np.ndarray) or array.ndim != ndim or array.dtype.kind not in allowed:
        got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else "an archive"
        raise ValueError(f"{path} must hold {_KINDS[kind]} in {ndim} dimension(s) (got {got})")
    return array.astype(np.int64) if kind == "i" else array


def read_features(folder: Path, stem: str) -> np.ndarray | SparseRows | None:
    """Read ``{stem}.npy`` (dense) or ``{stem}.npz`` (CSR) of a folder; None if there is neither.

    Raises:
        ValueError: The file is not of either form, or its numbers do not fit each other.
    """
    if (folder / f"{stem}.npy").is_file():
        return read_array(folder / f"{stem}.npy", 2, "f")
    path = folder / f"{stem}.npz"
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as archive:
        wanted = ["data", "indices", "indptr", "shape"]
        missing = [name for name in wanted if name not in archive.files]
        if missing:
            raise ValueError(
                f"{path} must hold the arrays {wanted} of a CSR matrix (missing: {missing}); "
                "scipy.sparse.save_npz writes them"
            )
        data, indices, indptr, shape = (archive[name] for name in wanted)
    if shape.shape != (2,) or indptr.shape != (shape[0] + 1,) or data.shape != indices.shape:
        raise ValueError(
            f"{path} is no CSR matrix: shape {shape.tolist()}, {indptr.shape[0]} row pointers, "
            f"{data.shape[0]} values, {indices.shape[0]} columns"
        )
    ascending = bool((np.diff(indptr) >= 0).all())
    if not ascending or indptr[0] != 0 or indptr[-1] != len(data):
        raise ValueError(f"{path} is no CSR matrix: indptr must ascend from 0 to {len(data)}")
    if indices.size and not 0 <= indices.min() <= indices.max() < shape[1]:
        raise ValueError(
            f"{path} is no CSR matrix: columns must be in [0, {shape[1]}) "
            f"(got {indices.min()} to {indices.max()})"
        )
    return SparseRows(data, indices, indptr, (int(shape[0]), int(shape[1])))


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
        values = torch.from_numpy(features.astype(np.float64 if row_normalize else features.dtype))
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
