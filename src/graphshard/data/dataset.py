# SPDX-License-Identifier: Apache-2.0
"""NodeDataset: a graph with a node classification task on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.files import check_text
from ..graph import Graph

SPLITS = ("train", "val", "test")
"""The three sets of nodes; a set is the field ``{name}_mask`` of the target type."""


@dataclass(frozen=True, kw_only=True)
class NodeDataset:
    """A graph in which the nodes of one type are to be classified.

    The target type has the fields ``label`` ([num_nodes] int64 with -1 where unknown, or
    [num_nodes, num_classes] for a task with several labels per node), ``train_mask``, ``val_mask``
    and ``test_mask`` ([num_nodes] bool); usually every type has ``feat``.

    Args:
        name: What the data set is called.
        graph: Graph that carries the fields.
        num_classes: Number of classes; 0 where nothing is labelled.
        target: Node type that is classified.
        class_names: Name of each class, or empty.
        relation_names: Name of each value of ``edata['etype']``, where a homogeneous graph keeps
            its relations there; otherwise empty.

    Raises:
        ValueError: The target type does not exist or lacks a field, or a field has another shape.
        TypeError: A mask is not bool.
    """

    name: str
    graph: Graph
    num_classes: int
    target: str
    class_names: tuple[str, ...] = ()
    relation_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.target not in self.graph.ntypes:
            raise ValueError(
                f"target must be a node type of the graph (got {self.target!r}, "
                f"the graph has {self.graph.ntypes})"
            )
        for name in (*self.class_names, *self.relation_names):
            check_text(name, "the name of a class or relation")
        if self.num_classes < 0:
            raise ValueError(f"num_classes must not be negative (got {self.num_classes})")
        fields = self.graph.nodes[self.target].data
        wanted = ["label", *(f"{split}_mask" for split in SPLITS)]
        missing = [name for name in wanted if name not in fields]
        if missing:
            raise ValueError(
                f"nodes of type {self.target!r} must have the fields {wanted} (missing: {missing});"
                " NodeDataset.from_graph fills in empty ones"
            )
        for name in wanted[1:]:
            if fields[name].dtype != torch.bool or fields[name].ndim != 1:
                raise TypeError(
                    f"{name} must be a bool vector, one value per node (got "
                    f"{fields[name].dtype} of shape {tuple(fields[name].shape)}); of a matrix of "
                    "splits store one column"
                )

    @classmethod
    def from_graph(
        cls,
        graph: Graph,
        *,
        name: str = "graph",
        target: str | None = None,
        num_classes: int | None = None,
    ) -> NodeDataset:
        """Make a data set of a graph, adding what it lacks to a copy that shares all tensors.

        Missing labels become -1 everywhere; missing masks become empty.

        Args:
            graph: Graph, usually with ``label`` and the masks on one node type.
            name: What to call the data set.
            target: Node type to classify. None means the only type that has ``label``, or the only
                type there is.
            num_classes: None counts them: the largest label plus one, or the width of a label
                matrix.

        Raises:
            ValueError: ``target`` is None and the graph does not say which type it is.
        """
        target = _find_target(graph) if target is None else target
        graph = graph.local_var()
        fields = graph.nodes[target].data
        num_nodes = graph.num_nodes(target)
        if "label" not in fields:
            fields["label"] = torch.full((num_nodes,), -1, device=graph.device)
        for split in SPLITS:
            if f"{split}_mask" not in fields:
                empty = torch.zeros(num_nodes, dtype=torch.bool, device=graph.device)
                fields[f"{split}_mask"] = empty
        if num_classes is None:
            num_classes = count_classes(fields["label"])
        return cls(name=name, graph=graph, num_classes=num_classes, target=target)

    @property
    def num_relations(self) -> int:
        """Number of relation ids in ``edata['etype']``, or of relations of a typed graph."""
        return len(self.relation_names) or len(self.graph.canonical_etypes)

    def node_ids(self, split: str) -> Tensor:
        """Ids of the target nodes in a set, ascending.

        Args:
            split: ``'train'``, ``'val'`` or ``'test'``.

        Raises:
            ValueError: ``split`` is none of these.
        """
        if split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS} (got {split!r})")
        mask = self.graph.nodes[self.target].data[f"{split}_mask"]
        return mask.nonzero().squeeze(1).to(self.graph.idtype)


def count_classes(label: Tensor) -> int:
    """Number of classes that a label field speaks of."""
    if label.ndim > 1:
        return int(label.shape[1])
    return int(label.max()) + 1 if label.numel() else 0


def _find_target(graph: Graph) -> str:
    labelled = [t for t in graph.ntypes if "label" in graph.nodes[t].data]
    candidates = labelled or graph.ntypes
    if len(candidates) != 1:
        raise ValueError(
            f"target must be given, since {len(candidates)} node types could be it: {candidates}"
        )
    return candidates[0]
