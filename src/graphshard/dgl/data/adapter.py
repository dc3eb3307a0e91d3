# SPDX-License-Identifier: Apache-2.0
"""Any data set as one for a task: with sets of nodes, edges or graphs to train and test on.

What is split at random is kept in ``save_path``, in the files that DGL writes, so that the next run
and other processes have the same sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._base.files import read_json_regular, write_json
from ...data.dataset import MASKS, SPLITS
from ...data.npy import read_npz
from ...errors import DGLError, GraphValueError
from ...graph import Graph, graph, load_graphs, save_graphs
from .dgl_dataset import DGLDataset
from .utils import add_nodepred_split, generate_mask_tensor, idx2mask, three_sets

__all__ = ["AsGraphPredDataset", "AsLinkPredDataset", "AsNodePredDataset"]

_OF_OGB = ("train", "valid", "test")


class _Adapter(DGLDataset):
    """What the three share: the data set, and the names of their files."""

    dataset: Any
    split_ratio: Sequence[float] | None

    @property
    def _graph_file(self) -> Path:
        return Path(self.save_path) / f"graph_{self.hash}.bin"

    @property
    def _info_file(self) -> Path:
        return Path(self.save_path) / f"info_{self.hash}.json"

    def has_cache(self) -> bool:
        """Whether an earlier run has saved it."""
        return self._info_file.is_file()

    @property
    def _ratio(self) -> list[float] | None:
        return None if self.split_ratio is None else list(self.split_ratio)

    def _write_info(self, **info: Any) -> None:
        self._info_file.parent.mkdir(parents=True, exist_ok=True)
        self._info_file.unlink(missing_ok=True)
        write_json(self._info_file, {"split_ratio": self._ratio, **info})

    def _read_info(self) -> dict[str, Any]:
        info: dict[str, Any] = read_json_regular(self._info_file)
        if info["split_ratio"] != self._ratio:
            raise GraphValueError(f"{self._info_file} is of other split ratios")
        return info


class _OneGraphAdapter(_Adapter):
    g: Graph

    def _write_graph(self, g: Graph, tensors: dict[str, Tensor] | None = None) -> None:
        self._graph_file.parent.mkdir(parents=True, exist_ok=True)
        save_graphs(str(self._graph_file), [g], tensors)

    def __getitem__(self, idx: int) -> Graph:
        """The whole graph; of links, the training graph, where an earlier run has saved it."""
        return self.g

    def __len__(self) -> int:
        return 1


class AsNodePredDataset(_OneGraphAdapter):
    """One graph with ``label``, ``train_mask``, ``val_mask`` and ``test_mask`` on its nodes.

    Args:
        split_ratio: Shares of the nodes to train, validate and test on, drawn by NumPy's
            generator; None takes the sets that the data set has.
    """

    def __init__(
        self,
        dataset: Any,
        split_ratio: Sequence[float] | None = None,
        target_ntype: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.dataset, self.split_ratio, self.target_ntype = dataset, split_ratio, target_ntype
        key = (split_ratio, target_ntype, dataset.name, "nodepred")
        super().__init__(dataset.name + "-as-nodepred", hash_key=key, **kwargs)

    def process(self) -> None:
        """Take the graph, and the sets or draw them."""
        of_ogb = hasattr(self.dataset, "get_idx_split")
        if of_ogb:
            given, label = self.dataset[0]
            self.g = given.clone()
            self.g.ndata["label"] = label.reshape(given.num_nodes())
        else:
            self.g = self.dataset[0].clone()
        fields = self.g.nodes[self.target_ntype].data
        if "label" not in fields:
            raise GraphValueError("the nodes must have their classes in the field 'label'")
        if self.split_ratio is not None:
            self._say("Generating train/val/test masks...")
            add_nodepred_split([self.g], self.split_ratio, self.target_ntype)
        elif of_ogb:
            split, count = self.dataset.get_idx_split(), self.g.num_nodes()
            for mask, theirs in zip(MASKS, _OF_OGB, strict=True):
                fields[mask] = generate_mask_tensor(idx2mask(split[theirs], count))
        elif not all(mask in fields for mask in MASKS):
            raise GraphValueError(
                "the nodes have no train_mask, val_mask and test_mask: give split_ratio"
            )
        self._set_split_index()
        classes = getattr(self.dataset, "num_classes", None)
        self.num_classes = len(fields["label"].unique()) if classes is None else classes

    def _set_split_index(self) -> None:
        fields = self.g.nodes[self.target_ntype].data
        self.train_idx, self.val_idx, self.test_idx = (
            fields[mask].nonzero().flatten() for mask in MASKS
        )

    def load(self) -> None:
        info = self._read_info()
        if info["target_ntype"] != self.target_ntype:
            raise GraphValueError(f"{self._info_file} is of nodes of another type")
        self.num_classes = info["num_classes"]
        self.g = load_graphs(str(self._graph_file))[0][0]
        fields = self.g.nodes[self.target_ntype].data
        for mask in MASKS:
            fields[mask] = fields[mask].bool()
        self._set_split_index()

    def save(self) -> None:
        self._write_graph(self.g)
        self._write_info(target_ntype=self.target_ntype, num_classes=self.num_classes)


class AsLinkPredDataset(_OneGraphAdapter):
    """One graph whose edges are parted: some to train on, others to find again.

    ``train_graph`` has the training edges; ``val_edges`` and ``test_edges`` are pairs (edges that
    there are, edges that there are not), each (sources, destinations).

    Args:
        split_ratio: Shares of the edges, drawn by NumPy's generator; None takes the edges of an OGB
            data set.
    """

    def __init__(
        self,
        dataset: Any,
        split_ratio: Sequence[float] | None = None,
        neg_ratio: int = 3,
        **kwargs: Any,
    ) -> None:
        self.g = dataset[0]
        self.num_nodes = self.g.num_nodes()
        self.dataset, self.split_ratio, self.neg_ratio = dataset, split_ratio, neg_ratio
        key = (neg_ratio, split_ratio, dataset.name, "linkpred")
        super().__init__(dataset.name + "-as-linkpred", hash_key=key, **kwargs)

    def process(self) -> None:
        """Take the sets of edges, or draw them."""
        if self.split_ratio is None:
            if not hasattr(self.dataset, "get_edge_split"):
                raise GraphValueError("the data set has no get_edge_split: give split_ratio")
            split, self.train_graph = self.dataset.get_edge_split(), self.g
            self.val_edges, self.test_edges = map(_edges_of_ogb, (split["valid"], split["test"]))
            return
        src, dst = (side.numpy() for side in self.g.edges())
        count, ends = len(src), torch.from_numpy(np.stack([src, dst]))
        order = np.random.permutation(count)
        num_train, num_val, num_test = (int(count * share) for share in self.split_ratio)
        train, val, test = np.split(order, [num_train, num_train + num_val])
        absent = torch.from_numpy(_absent_edges(self.g, self.neg_ratio * (num_val + num_test)))
        absent_val, absent_test = absent.tensor_split([self.neg_ratio * num_val], dim=1)
        self.val_edges = tuple(ends[:, val]), tuple(absent_val)
        self.test_edges = tuple(ends[:, test]), tuple(absent_test)
        self.train_graph = graph(tuple(ends[:, train]), num_nodes=self.num_nodes)
        self.train_graph.ndata["feat"] = self.g.ndata["feat"]

    def load(self) -> None:
        self._read_info()
        (self.train_graph,), stored = load_graphs(str(self._graph_file))
        self.g = self.train_graph
        self.val_edges, self.test_edges = (
            (
                (stored[f"{name}_pos_src"], stored[f"{name}_pos_dst"]),
                (stored[f"{name}_neg_src"], stored[f"{name}_neg_dst"]),
            )
            for name in ("val", "test")
        )

    def save(self) -> None:
        tensors = {
            f"{name}_{sign}_{side}": torch.as_tensor(values)
            for name, edges in (("val", self.val_edges), ("test", self.test_edges))
            for sign, ends in zip(("pos", "neg"), edges, strict=True)
            for side, values in zip(("src", "dst"), ends, strict=True)
        }
        self._write_graph(self.train_graph, tensors)
        self._write_info(neg_ratio=self.neg_ratio)

    @property
    def feat_size(self) -> int:
        """Width of the node features."""
        return int(self.train_graph.ndata["feat"].shape[-1])


def _absent_edges(g: Graph, count: int) -> np.ndarray:
    """Pairs of nodes without an edge, ``[2, count]`` if so many were drawn, ascending."""
    num_nodes = g.num_nodes()
    # Of so many draws at least ``count`` are no edges, but for 3 standard deviations (DGL's bound).
    share = g.num_edges() / num_nodes**2
    bound = [count**2, -(1 - share) * (2 * count + 9 * share), (1 - share) ** 2]
    draws = float(np.polynomial.Polynomial(bound).roots()[-1]) if count else 0.0
    size = int(count * (1 + (draws / count - 1.0))) if count else 0
    pairs = np.unique(np.random.randint(0, num_nodes, size=(2, size)), axis=1)
    joined = g.has_edges_between(torch.from_numpy(pairs[0]), torch.from_numpy(pairs[1]))
    return pairs[:, ~((pairs[0] == pairs[1]) | joined.bool().numpy())][:, :count]


def _edges_of_ogb(split: dict[str, Any]) -> Any:
    if "source_node" in split:
        absent = split["target_node_neg"]
        sources = np.repeat(split["source_node"], absent.shape[-1])
        return (split["source_node"], split["target_node"]), (sources, np.reshape(absent, -1))
    edges, absent = split["edge"], split["edge_neg"]
    return (edges[:, 0], edges[:, 1]), (absent[:, 0], absent[:, 1])


class AsGraphPredDataset(_Adapter):
    """Many graphs, with ``train_idx``, ``val_idx`` and ``test_idx`` among them.

    Args:
        split_ratio: Shares of the graphs, drawn by NumPy's generator; None takes the sets of an OGB
            data set, or the masks ``train_mask``, ``val_mask`` and ``test_mask``.
    """

    train_idx: Tensor
    val_idx: Tensor
    test_idx: Tensor

    def __init__(
        self, dataset: Any, split_ratio: Sequence[float] | None = None, **kwargs: Any
    ) -> None:
        self.dataset, self.split_ratio = dataset, split_ratio
        key = (split_ratio, dataset.name, "graphpred")
        super().__init__(dataset.name + "-as-graphpred", hash_key=key, **kwargs)

    def process(self) -> None:
        """Take the sets of graphs, or draw them."""
        if self.split_ratio is not None:
            self._say("Generating train/val/test split...")
            sets = list(map(torch.from_numpy, three_sets(len(self.dataset), self.split_ratio)))
        elif hasattr(self.dataset, "get_idx_split"):
            split = self.dataset.get_idx_split()
            sets = [torch.as_tensor(split[name]) for name in _OF_OGB]
        elif all(hasattr(self.dataset, mask) for mask in MASKS):
            masks = [torch.as_tensor(getattr(self.dataset, mask)) for mask in MASKS]
            sets = [mask.nonzero().flatten() for mask in masks]
        else:
            raise DGLError("the data set has no sets to train and test on: give split_ratio")
        self.train_idx, self.val_idx, self.test_idx = sets
        self.num_classes = getattr(self.dataset, "num_classes", None)
        self.num_tasks = getattr(self.dataset, "num_tasks", 1)

    def load(self) -> None:
        info = self._read_info()
        self.num_tasks, self.num_classes = info["num_tasks"], info["num_classes"]
        names = [f"{name}_idx" for name in SPLITS]
        split = read_npz(self._split_file, names.__contains__)
        self.train_idx, self.val_idx, self.test_idx = (torch.from_numpy(split[n]) for n in names)

    def save(self) -> None:
        self._write_info(num_tasks=self.num_tasks, num_classes=self.num_classes)
        sets = {f"{name}_idx": getattr(self, f"{name}_idx").numpy() for name in SPLITS}
        np.savez(self._split_file, **sets)

    @property
    def _split_file(self) -> Path:
        return Path(self.save_path) / f"split_{self.hash}.npz"

    @property
    def node_feat_size(self) -> int | None:
        """Width of ``ndata["feat"]``, or None."""
        return _width(self[0][0].ndata)

    @property
    def edge_feat_size(self) -> int | None:
        """Width of ``edata["feat"]``, or None."""
        return _width(self[0][0].edata)

    def __getitem__(self, idx: int) -> Any:
        return self.dataset[idx]

    def __len__(self) -> int:
        return len(self.dataset)


def _width(fields: Mapping[str, Tensor]) -> int | None:
    return int(fields["feat"].shape[-1]) if "feat" in fields else None
