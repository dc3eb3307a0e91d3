# SPDX-License-Identifier: Apache-2.0
"""CoraGraphDataset, CiteseerGraphDataset, PubmedGraphDataset: the Planetoid splits, from files.

Source: Yang, Cohen and Salakhutdinov, "Revisiting Semi-Supervised Learning with Graph
Embeddings", ICML 2016, https://arxiv.org/abs/1603.08861.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._base.files import read_text_regular
from ...data import load_dataset
from ...errors import GraphValueError
from ...graph import Graph, graph, load_graphs
from ..graphs._order import reorder_graph
from ._base import DGLBuiltinDataset, find_folder, only_graph
from ._planetoid import PlanetoidFormatError, read_planetoid

_PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
_ARRAYS = ("edge_index.npy", "label.npy", "train_idx.npy", "test_idx.npy")
_NAMES = {"cora": "cora_v2", "citeseer": "citeseer", "pubmed": "pubmed"}
_NUM_VALID = 500


class CitationGraphDataset(DGLBuiltinDataset):
    """Cora, Citeseer or Pubmed: papers, who cites whom, words, and the fields they are in.

    Files are looked for in ``raw_dir`` and in folders in it that have the name of the data set, or
    the one that DGL gives them (``cora_v2_d697a464``); the first of these that is there is read:

    * the eight files of Planetoid, ``ind.cora.x`` and so on (of the name ``cora_v2`` too), which
      are read without running them;
    * what DGL has saved, ``cora_v2_dgl_graph.bin``;
    * a folder of arrays as `load_dataset` reads it, in which edges come in another order. That of
      Cora comes with the package, and is read where no ``raw_dir`` is given and DGL's has none.

    Features are divided by the sum of their row. Nothing is downloaded or saved.

    Args:
        name: ``"cora"``, ``"citeseer"`` or ``"pubmed"``.
        raw_dir: Where files are looked for; by default as for `DGLDataset`.
        force_reload: Do not read what DGL has saved.
        verbose: Print what was read.
        reverse_edge: Have both directions of every edge; of arrays, leave them as they are.
        transform: As for `DGLDataset`.
        reorder: Number nodes by reverse Cuthill-McKee and edges by destination.

    Raises:
        FileNotFoundError: The files are not there; the error says what belongs where.
        ValueError: An unknown name, or a damaged file.
    """

    def __init__(
        self,
        name: str,
        raw_dir: str | os.PathLike[str] | None = None,
        force_reload: bool = False,
        verbose: bool = True,
        reverse_edge: bool = True,
        transform: Callable[[Graph], Any] | None = None,
        reorder: bool = False,
    ) -> None:
        self._title = name.lower()
        if self._title not in _NAMES:
            raise GraphValueError(f"name must be one of {list(_NAMES)} (got {name!r})")
        self._reverse_edge, self._reorder = reverse_edge, reorder
        self._own_folder = raw_dir is not None
        super().__init__(
            _NAMES[self._title],
            url=None,
            raw_dir=raw_dir,
            force_reload=force_reload,
            verbose=verbose,
            transform=transform,
        )

    def process(self) -> None:
        """Read the files."""
        titles = sorted({self._title, self.name})
        planetoid = [[f"ind.{title}.{part}" for part in _PARTS] for title in titles]
        saved = [] if self._force_reload or not self._reverse_edge else [[self._saved_name]]
        folder = find_folder(self.raw_dir, titles, [*planetoid, *saved, _ARRAYS])
        if folder is None and self._title == "cora" and not self._own_folder:
            found = _from_arrays("cora", self._reverse_edge)
        elif folder is None:
            raise FileNotFoundError(
                f"{self._title} is not downloaded: put the Planetoid files "
                f"ind.{self._title}.{{{','.join(_PARTS)}}}, DGL's {self._saved_name}, or a folder "
                f"of arrays ({', '.join(_ARRAYS)}, feat.npz) into "
                f"{Path(self.raw_dir) / self._title}"
            )
        else:
            found = self._read(folder, titles)
        if self._reorder:
            found = reorder_graph(
                found, node_permute_algo="rcmk", edge_permute_algo="dst", store_ids=False
            )
        self._g = found
        self._num_classes = int(found.ndata["label"].max()) + 1 if found.num_nodes() else 0
        self._say(
            f"{self._title}: {found.num_nodes()} nodes, {found.num_edges()} edges, "
            f"{found.ndata['feat'].shape[1]} features, {self._num_classes} classes"
        )

    def _read(self, folder: Path, titles: list[str]) -> Graph:
        for title in titles:
            if (folder / f"ind.{title}.x").is_file():
                return _from_planetoid(folder, title, self._reverse_edge)
        if (folder / self._saved_name).is_file() and not self._force_reload:
            graphs, _ = load_graphs(str(folder / self._saved_name))
            for name in ("train_mask", "val_mask", "test_mask"):
                graphs[0].ndata[name] = graphs[0].ndata[name].bool()
            return graphs[0]
        return _from_arrays(folder, self._reverse_edge)

    @property
    def _saved_name(self) -> str:
        return f"{self.name}_dgl_graph.bin"

    @property
    def num_classes(self) -> int:
        """Number of fields."""
        return self._num_classes

    @property
    def num_labels(self) -> int:
        """As ``num_classes``."""
        return self._num_classes

    @property
    def reverse_edge(self) -> bool:
        return self._reverse_edge

    def __getitem__(self, idx: int) -> Any:
        """The graph, with ``feat``, ``label``, ``train_mask``, ``val_mask`` and ``test_mask``."""
        only_graph(idx)
        return self._transformed(self._g)

    def __len__(self) -> int:
        """1."""
        return 1


def _named(title: str, size: str) -> type[CitationGraphDataset]:
    class Named(CitationGraphDataset):
        def __init__(
            self,
            raw_dir: str | os.PathLike[str] | None = None,
            force_reload: bool = False,
            verbose: bool = True,
            reverse_edge: bool = True,
            transform: Callable[[Graph], Any] | None = None,
            reorder: bool = False,
        ) -> None:
            super().__init__(
                title, raw_dir, force_reload, verbose, reverse_edge, transform, reorder
            )

    Named.__name__ = Named.__qualname__ = f"{title.capitalize()}GraphDataset"
    Named.__doc__ = f"{title.capitalize()}, {size}; see `CitationGraphDataset` for arguments."
    return Named


CoraGraphDataset = _named("cora", "2,708 papers of 7 fields")
CiteseerGraphDataset = _named("citeseer", "3,327 papers of 6 fields")
PubmedGraphDataset = _named("pubmed", "19,717 papers of 3 fields")


def _from_arrays(source: str | Path, reverse_edge: bool) -> Graph:
    found = load_dataset(source, row_normalize=True, dtype=torch.float32).graph
    if not reverse_edge:
        src, dst = found.edges()
        kept = src <= dst
        one_way = graph((src[kept], dst[kept]), num_nodes=found.num_nodes())
        one_way.ndata.update(found.ndata)
        return one_way
    return found


def _from_planetoid(folder: Path, title: str, reverse_edge: bool) -> Graph:
    parts = {p: read_planetoid(folder / f"ind.{title}.{p}") for p in _PARTS if p != "test.index"}
    lines = read_text_regular(folder / f"ind.{title}.test.index").split()
    try:
        test = np.array([int(line) for line in lines], dtype=np.int64)
        return _assembled(parts, test, reverse_edge)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise PlanetoidFormatError(
            f"the files ind.{title}.* in {folder} do not fit together ({error}); get them again"
        ) from None


def _assembled(parts: dict[str, Any], test: np.ndarray, reverse_edge: bool) -> Graph:
    """What the files say: rows of ``tx`` and ``ty`` belong to the nodes that ``test`` names."""
    import scipy.sparse

    num_known, ascending = parts["allx"].shape[0], np.sort(test)
    if len(test) == 0 or ascending[0] != num_known or len(np.unique(test)) != len(test):
        raise ValueError(f"test.index must name nodes from {num_known} on, each once")
    num_nodes = int(ascending[-1]) + 1  # some may be in no file: Citeseer's have no words
    if num_nodes > 100 * (num_known + len(test)) or parts["tx"].shape[0] != len(test):
        raise ValueError(f"test.index names {len(test)} nodes up to {num_nodes - 1}")
    known = scipy.sparse.coo_matrix(parts["allx"])
    tested = scipy.sparse.coo_matrix(parts["tx"])
    rows = np.concatenate([known.row, test[tested.row]])
    columns = np.concatenate([known.col, tested.col])
    words = np.concatenate([known.data, tested.data]).astype(np.float64)
    width = parts["allx"].shape[1]
    features = scipy.sparse.csr_matrix((words, (rows, columns)), shape=(num_nodes, width))
    sums = np.asarray(features.sum(1)).reshape(-1)
    scale = np.divide(1.0, sums, out=np.zeros_like(sums), where=sums != 0)
    dense = scipy.sparse.diags(scale).dot(features).toarray().astype(np.float32)
    one_hot = np.zeros((num_nodes, parts["ally"].shape[1]))
    one_hot[:num_known] = parts["ally"]
    one_hot[test] = parts["ty"]
    src, dst = _edges(parts["graph"], reverse_edge)
    found = graph((src, dst), num_nodes=max([num_nodes, *(src + 1), *(dst + 1)]))
    if found.num_nodes() != num_nodes:
        raise ValueError(f"graph names nodes up to {found.num_nodes() - 1}, not {num_nodes - 1}")
    num_train = len(parts["y"])
    ids = torch.arange(num_nodes)
    is_test = torch.zeros(num_nodes, dtype=torch.bool)
    is_test[torch.from_numpy(test)] = True
    found.ndata["train_mask"] = ids < num_train
    found.ndata["val_mask"] = (ids >= num_train) & (ids < num_train + _NUM_VALID)
    found.ndata["test_mask"] = is_test
    found.ndata["label"] = torch.from_numpy(one_hot.argmax(1))
    found.ndata["feat"] = torch.from_numpy(dense)
    return found


def _edges(neighbors: dict[int, list[int]], reverse_edge: bool) -> tuple[Tensor, Tensor]:
    """Edges once each, in the order in which NetworkX, and so DGL, has them."""
    adjacency: dict[int, dict[int, None]] = {node: {} for node in neighbors}
    for node, others in neighbors.items():
        for other in others:
            adjacency[node][other] = None
            adjacency.setdefault(other, {})[node] = None
    src, dst, seen = [], [], set()
    for node, found in adjacency.items():
        for other in found:
            if reverse_edge or other not in seen:
                src.append(node)
                dst.append(other)
        seen.add(node)
    return torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64)
