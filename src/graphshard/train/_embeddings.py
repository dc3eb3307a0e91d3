# SPDX-License-Identifier: Apache-2.0
"""NodeEmbeddings: a learnable row for each node of a type that has no features.

A rank holds the rows of the nodes that it owns, and nobody else holds them. So they take no part in
`sync_params` and `gather_grads`: the exchange of the first layer brings each row's gradient home.
The first value of a row depends on the seed, the node type and the node's original id, and on
nothing else: neither on the number of ranks nor on the partition.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Table:
    """This rank's rows of one table of embeddings.

    Args:
        ids: ``[num_owned]``, ids that do not depend on the partition.
        height: Rows of the matrix that the table stands for, on all ranks; sets the scale.
        width: Columns.
    """

    ids: Tensor
    height: int
    width: int


class NodeEmbeddings(nn.Module):
    """Learnable rows of this rank's nodes, by node type.

    Args:
        tables: What to hold, by name; usually the node type.
        seed: Decides the first values, which are Xavier uniform.
        dtype: Floating point dtype of the rows.
    """

    def __init__(self, tables: Mapping[str, Table], seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.names = tuple(tables)
        # A list, because node types may have names that an attribute cannot have.
        self.rows = nn.ParameterList()
        for place, (name, table) in enumerate(tables.items()):
            # A buffer, so that a checkpoint says whose rows it holds.
            self.register_buffer(f"ids_{place}", table.ids.clone())
            bound = math.sqrt(6 / (table.height + table.width))
            drawn = uniform_rows(seed, name, table.ids, table.width)
            self.rows.append(nn.Parameter(((2 * drawn - 1) * bound).to(dtype)))

    def forward(self) -> dict[str, Tensor]:
        """Name to rows ``[num_owned, width]``."""
        return dict(zip(self.names, self.rows, strict=True))


def uniform_rows(seed: int, stream: str, ids: Tensor, width: int) -> Tensor:
    """Numbers in [0, 1), float64 ``[num_ids, width]``; row ``i`` depends on ``ids[i]`` alone.

    Each number is the hash of its place: SplitMix64's finaliser over (seed and stream, id, column).

    Args:
        seed: Any number in [0, 2^63).
        stream: Keeps the numbers of different uses apart.
        ids: Integers ``[num_ids]``.
        width: Number of columns.
    """
    word = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest()
    key = np.frombuffer(word, dtype="<u8").astype(np.uint64)
    rows = _mix(_mix(ids.cpu().numpy().astype(np.uint64) + key) ^ key)
    columns = np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN
    bits = _mix(rows[:, None] + columns[None, :])
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
