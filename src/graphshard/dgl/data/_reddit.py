# SPDX-License-Identifier: Apache-2.0
"""RedditDataset: posts, joined where one user commented on both, from local files.

Source: Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs", NeurIPS
2017, https://arxiv.org/abs/1706.02216.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...data.npy import read_npz
from ...errors import GraphValueError
from ...graph import Graph, graph, load_graphs
from ..graphs._order import reorder_graph
from ._base import DGLBuiltinDataset, find_folder, only_graph

_SAVED = "dgl_graph.bin"
_ENDS, _NODES = ("row", "col", "shape"), ("feature", "label", "node_types")
_MASKS = ("train_mask", "val_mask", "test_mask")


class RedditDataset(DGLBuiltinDataset):
    """232,965 posts, 114,615,892 edges, 602 features, 41 communities.

    Read is ``reddit_graph.npz`` (``reddit_self_loop_graph.npz`` with self loops) with
    ``reddit_data.npz``, or DGL's ``dgl_graph.bin``, in ``raw_dir`` or in a folder in it that has
    the name that DGL gives it. Nothing is downloaded or saved. Nodes are numbered by reverse
    Cuthill-McKee and edges by destination, as in DGL.

    Args:
        self_loop: The graph with an edge from each node to itself.
        raw_dir: As for `DGLDataset`.
        force_reload: Do not read what DGL has saved.
        verbose: Print what was read.
        transform: As for `DGLDataset`.

    Raises:
        FileNotFoundError: The files are not there; the error says what belongs where.
        ValueError: A damaged file, or files that do not fit together.
    """

    def __init__(
        self,
        self_loop: bool = False,
        raw_dir: str | os.PathLike[str] | None = None,
        force_reload: bool = False,
        verbose: bool = False,
        transform: Callable[[Graph], Any] | None = None,
    ) -> None:
        name = "reddit_self_loop" if self_loop else "reddit"
        super().__init__(
            name,
            url=None,
            raw_dir=raw_dir,
            force_reload=force_reload,
            verbose=verbose,
            transform=transform,
        )

    def process(self) -> None:
        """Read the files."""
        raw = [f"{self.name}_graph.npz", "reddit_data.npz"]
        saved = [] if self._force_reload else [[_SAVED]]
        folder = find_folder(self.raw_dir, [self.name], [raw, *saved])
        if folder is None:
            raise FileNotFoundError(
                f"{self.name} is not downloaded: put {' and '.join(raw)}, or DGL's {_SAVED}, into "
                f"{Path(self.raw_dir) / self.name}"
            )
        if all((folder / file).is_file() for file in raw):
            self._g = _read(folder / raw[0], folder / raw[1])
        else:
            (self._g,), _ = load_graphs(str(folder / _SAVED))
            for mask in _MASKS:
                self._g.ndata[mask] = self._g.ndata[mask].bool()
        self._say(f"{self.name}: {self._g.num_nodes()} nodes, {self._g.num_edges()} edges")

    @property
    def num_classes(self) -> int:
        """Number of communities."""
        return 41

    def __getitem__(self, idx: int) -> Any:
        """The graph, with ``feat``, ``label``, ``train_mask``, ``val_mask`` and ``test_mask``."""
        only_graph(idx)
        return self._transformed(self._g)

    def __len__(self) -> int:
        """1."""
        return 1


def _read(edges: Path, nodes: Path) -> Graph:
    ends, rows = read_npz(edges, _ENDS.__contains__), read_npz(nodes, _NODES.__contains__)
    for path, arrays, wanted in ((edges, ends, _ENDS), (nodes, rows, _NODES)):
        if set(arrays) != set(wanted):
            raise GraphValueError(f"{path} must have the arrays {', '.join(wanted)}; get it again")
    count = len(rows["label"])
    if any(len(rows[name]) != count for name in _NODES) or ends["shape"].tolist() != [count] * 2:
        raise GraphValueError(
            f"{edges} and {nodes} must have the same nodes (got {ends['shape'].tolist()} and "
            f"{count}); get them again"
        )
    src, dst = (torch.from_numpy(ends[name].astype(np.int64)) for name in ("row", "col"))
    found = graph((src, dst), num_nodes=count)
    for number, mask in enumerate(_MASKS, 1):
        found.ndata[mask] = torch.from_numpy(rows["node_types"] == number)
    found.ndata["feat"] = torch.from_numpy(rows["feature"].astype(np.float32))
    found.ndata["label"] = torch.from_numpy(rows["label"].astype(np.int64))
    return reorder_graph(found, node_permute_algo="rcmk", edge_permute_algo="dst", store_ids=False)
