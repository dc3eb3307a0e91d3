# SPDX-License-Identifier: Apache-2.0
"""DglNodePropPredDataset: an OGB data set as scripts take it from ``ogb.nodeproppred``."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from ...data import from_ogb
from ...graph import Graph

_SPLITS = {"train": "train", "valid": "val", "test": "test"}
"""OGB's names of the sets, and ours."""


class DglNodePropPredDataset:
    """OGB's data set of one graph: ``dataset[0]`` is the graph and the labels.

    The class of that name in ``ogb`` needs DGL; this one reads the same files, see `from_ogb`. Node
    fields are ``feat`` and, without the ``node_`` of their files, the others; labels and sets are
    not among them.

    Args:
        name: Such as ``'ogbn-arxiv'``.
        root: Folder that holds, or is to hold, ``ogbn_arxiv``.

    Raises:
        ImportError: As for `from_ogb`.
        ValueError: As for `from_ogb`.

    Example:
        >>> dataset = DglNodePropPredDataset('ogbn-arxiv', 'downloads')  # doctest: +SKIP
        >>> graph, labels = dataset[0]  # doctest: +SKIP
        >>> train = dataset.get_idx_split()["train"]  # doctest: +SKIP
    """

    def __init__(self, name: str, root: str | os.PathLike[str] = "dataset") -> None:
        self._data = from_ogb(name, root)
        self.name, self.num_classes = name, self._data.num_classes

    @property
    def _is_typed(self) -> bool:
        return len(self._data.graph.ntypes) > 1

    def __len__(self) -> int:
        """1."""
        return 1

    def __getitem__(self, index: int) -> tuple[Graph, Any]:
        """The graph, and labels ``[num_nodes, num_tasks]``; node type to these, if it has several.

        Raises:
            IndexError: ``index`` is not 0.
        """
        if index != 0:
            raise IndexError(f"the data set has one graph, number 0 (got {index})")
        data, target = self._data, self._data.target
        g = data.graph.local_var()
        for ntype in g.ntypes:
            _rename(g.nodes[ntype].data, "node_")
        for etype in g.canonical_etypes:
            _rename(g.edges[etype].data, "edge_")
        fields = g.nodes[target].data
        labels = fields.pop("label")
        for split in _SPLITS.values():
            del fields[f"{split}_mask"]
        labels = labels.view(len(labels), -1)
        return g, {target: labels} if self._is_typed else labels

    def get_idx_split(self) -> dict[str, Any]:
        """``"train"``, ``"valid"`` and ``"test"`` to node ids; or to node type to ids."""
        found: dict[str, Tensor] = {k: self._data.node_ids(v) for k, v in _SPLITS.items()}
        if self._is_typed:
            return {split: {self._data.target: ids} for split, ids in found.items()}
        return found


def _rename(fields: Any, prefix: str) -> None:
    for name in list(fields):
        if name.startswith(prefix):
            fields[name.removeprefix(prefix)] = fields.pop(name)
