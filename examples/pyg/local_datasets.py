# SPDX-License-Identifier: Apache-2.0
"""Planetoid and Entities, with the fields that PyG's classes have, out of local files.

For the scripts of this folder, which so need no download; with PyG's own, import these names from
``torch_geometric.datasets``. A folder has the arrays that `graphshard.data.load_dataset` reads.
Cora comes with graphshard.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from torch_geometric.data import Data

import graphshard


def folder(root: str, name: str) -> str:
    """``root/name`` if it is there, or the name of one that graphshard knows.

    It knows Cora, and what lies in the folder that ``GRAPHSHARD_DATASETS`` names.
    """
    path = os.path.join(root, name.lower())
    return path if os.path.isdir(path) else name.lower()


class Planetoid:
    """A citation graph.

    Args:
        root: Where folders of arrays are.
        name: "Cora", "Citeseer".
        split: "public", or "full": every node that is neither for validation nor for the test
            trains.
        transform: Of the data object.
    """

    def __init__(
        self,
        root: str,
        name: str,
        split: str = "public",
        transform: Callable[[Data], Data] | None = None,
    ) -> None:
        found = graphshard.data.load_dataset(folder(root, name))
        self.num_classes = found.num_classes
        self._data = graphshard.data.to_pyg(found.graph)
        self.num_features = self._data.num_features
        if split == "full":
            self._data.train_mask = ~(self._data.val_mask | self._data.test_mask)
        self._transform = transform

    def __getitem__(self, place: int) -> Data:
        data = self._data.clone()
        return data if self._transform is None else self._transform(data)


class Entities:
    """An RDF graph with its relations' inverses; some nodes have a class.

    Args:
        root: Where folders of arrays are.
        name: "AIFB", "MUTAG".
    """

    def __init__(self, root: str, name: str) -> None:
        found = graphshard.data.load_dataset(folder(root, name), add_inverse=True)
        graph = graphshard.data.to_pyg(found.graph)
        self.num_classes = found.num_classes
        self.num_relations = int(graph.etype.max()) + 1
        train, test = (mask.nonzero().view(-1) for mask in (graph.train_mask, graph.test_mask))
        self._data = Data(
            edge_index=graph.edge_index,
            edge_type=graph.etype,
            num_nodes=graph.num_nodes,
            train_idx=train,
            train_y=graph.y[train],
            test_idx=test,
            test_y=graph.y[test],
        )

    def __getitem__(self, place: int) -> Data:
        return self._data.clone()
