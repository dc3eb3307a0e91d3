# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.distributed.graph_partition_book``, and ``dgl.distributed.id_map``'s."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..._base.typing import DEFAULT_CANONICAL_ETYPE as DEFAULT_ETYPE
from ..._base.typing import DEFAULT_NTYPE
from ...partition import PartitionBook, RangePartitionBook
from ...partition.format import etype_key as _etype_tuple_to_str
from ...servers import EdgePartitionPolicy, HeteroDataName, NodePartitionPolicy, PartitionPolicy

GraphPartitionBook = PartitionBook


class IdMap:
    """From ids that are one range for all types to types, and ids within a type.

    Args:
        id_ranges: Type -> ``[num_parts, 2]``, first id of the type in each part and the one after
            its last: the ``node_map`` or ``edge_map`` of a partition.
    """

    def __init__(self, id_ranges: Mapping[object, Tensor]) -> None:
        of_types = [torch.as_tensor(of_type) for of_type in id_ranges.values()]
        # where two begin alike, the first has no ids in that part
        ranges = torch.stack(sorted(of_types, key=lambda of_type: of_type[0].tolist()))
        self.num_types, self.num_parts = ranges.shape[:2]
        sizes = ranges[:, :, 1] - ranges[:, :, 0]
        self._starts = ranges[:, :, 0].T.flatten()  # part by part, and in it type by type
        self._first = (sizes.cumsum(1) - sizes).T.flatten()

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Number of the type, and id within it, of each id."""
        row = torch.searchsorted(self._starts, ids, right=True) - 1
        # a type without ids in a part starts where the next one does
        return row % self.num_types, ids - self._starts[row] + self._first[row]


__all__ = [
    "DEFAULT_ETYPE", "DEFAULT_NTYPE", "EdgePartitionPolicy", "GraphPartitionBook",
    "HeteroDataName", "IdMap", "NodePartitionPolicy", "PartitionPolicy", "RangePartitionBook",
    "_etype_tuple_to_str",
]  # fmt: skip
