# SPDX-License-Identifier: Apache-2.0
"""Data sets of many graphs, from local files: TU's, GIN's, proteins, molecules, sentences."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._base.files import read_json_regular, read_text_regular
from ...data.npy import read_npz
from ...errors import GraphValueError
from ...graph import Graph, from_networkx, graph, node_subgraph, to_bidirected
from .dgl_dataset import LocalDataset, get_dgl_url
from .utils import loadtxt

__all__ = [
    "QM9", "SST", "GINDataset", "LegacyPPIDataset", "LegacyTUDataset", "PPIDataset", "QM9Dataset",
    "QM9Edge", "QM9EdgeDataset", "SSTDataset", "TUDataset",
]  # fmt: skip

_Transform = Callable[[Graph], Any] | None
_Folder = str | os.PathLike[str] | None


class TUDataset(LocalDataset):
    """Graphs with a label each, of the collection of TU Dortmund.

    Source: Morris et al., "TUDataset: A collection of benchmark datasets for learning with graphs",
    2020, https://arxiv.org/abs/2007.08663. Read are ``NAME_A.txt``, ``NAME_graph_indicator.txt``,
    ``NAME_graph_labels.txt`` (or ``NAME_graph_attributes.txt``) and, where they are there,
    ``NAME_node_labels.txt``, ``NAME_node_attributes.txt``, ``NAME_edge_labels.txt`` and
    ``NAME_edge_attributes.txt``, which become ``ndata["node_labels"]``, ``ndata["node_attr"]``,
    ``edata["edge_labels"]`` and, as in DGL, ``edata["node_labels"]``.
    """

    _url = "https://www.chrsmrrs.com/graphkerneldatasets/{}.zip"
    num_labels: int | None = None
    graph_labels: Any

    def __init__(
        self,
        name: str,
        raw_dir: _Folder = None,
        force_reload: bool = False,
        verbose: bool = False,
        transform: _Transform = None,
    ) -> None:
        url = type(self)._url.format(name)
        super().__init__(name, url, raw_dir, (), force_reload, verbose, transform)

    def process(self) -> None:
        whole = self._whole_graph()
        path = self._file_path("graph_labels")
        if os.path.exists(path):
            labels = self._classes(path)
        else:
            labels = loadtxt(self._file_path("graph_attributes"), ",", np.float64)
        self.graph_labels = torch.from_numpy(labels)
        self._set_fields(whole)
        self.graph_lists = [node_subgraph(whole, nodes) for nodes in self._nodes]
        self._say(f"{self.name}: {len(self.graph_lists)} graphs")

    def _classes(self, path: str) -> np.ndarray:
        classes, labels = np.unique(loadtxt(path, ","), return_inverse=True)
        self.num_labels = len(classes)
        return labels.reshape(-1, 1)

    def _set_fields(self, whole: Graph) -> None:
        for file, (fields, name) in {
            "node_labels": (whole.ndata, "node_labels"),
            "node_attributes": (whole.ndata, "node_attr"),
            "edge_labels": (whole.edata, "edge_labels"),
            "edge_attributes": (whole.edata, "node_labels"),
        }.items():
            if os.path.exists(self._file_path(file)):
                values = loadtxt(self._file_path(file), ",")
                first = values.min() if "label" in file else 0
                fields[name] = torch.from_numpy(values - first)

    def _whole_graph(self) -> Graph:
        """All graphs as one; remembers which nodes are whose."""
        self._folder = self._folder_with([f"{self.name}_A.txt", f"{self.name}_graph_indicator.txt"])
        edges, owner = (
            torch.from_numpy(loadtxt(self._file_path(kind), ",", np.int64))
            for kind in ("A", "graph_indicator")
        )
        edges, owner = edges - edges.min(), owner.flatten() - owner.min()
        self._nodes: Sequence[Tensor] = owner.argsort(stable=True).split(owner.bincount().tolist())
        self.max_num_node = max((len(nodes) for nodes in self._nodes), default=0)
        return graph((edges[:, 0], edges[:, 1]), num_nodes=len(owner))

    def _file_path(self, category: str) -> str:
        return str(self._folder / f"{self.name}_{category}.txt")

    def __getitem__(self, idx: int) -> tuple[Any, Any]:
        return self._transformed(self.graph_lists[idx]), self.graph_labels[idx]

    def __len__(self) -> int:
        return len(self.graph_lists)

    def statistics(self) -> tuple[int, int | None, int]:
        """Width of ``ndata["feat"]``, number of classes, and the most nodes that a graph has."""
        width = int(self.graph_lists[0].ndata["feat"].shape[1])
        return width, self.num_labels, self.max_num_node

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None where graphs have numbers and no class."""
        return self.num_labels


class LegacyTUDataset(TUDataset):
    """As `TUDataset`, with ``ndata["feat"]``: attributes, labels as one-hot rows, or ones."""

    def __init__(
        self,
        name: str,
        use_pandas: bool = False,
        hidden_size: int = 10,
        max_allow_node: int | None = None,
        raw_dir: _Folder = None,
        force_reload: bool = False,
        verbose: bool = False,
        transform: _Transform = None,
    ) -> None:
        self.hidden_size, self.max_allow_node = hidden_size, max_allow_node
        super().__init__(name, raw_dir, force_reload, verbose, transform)

    def _classes(self, path: str) -> np.ndarray:
        labels = loadtxt(path, ",", np.int64)
        labels = labels - labels.min()
        self.num_labels = int(labels.max()) + 1
        return labels

    def _set_fields(self, whole: Graph) -> None:
        labels = self.graph_labels
        self.graph_labels = labels.reshape(-1) if labels.shape[1] == 1 else labels
        attributes, of_nodes = map(self._file_path, ("node_attributes", "node_labels"))
        if os.path.exists(attributes):
            self.data_mode = "node_attr"
            rows = torch.from_numpy(loadtxt(attributes, ",", np.float64)).float()
        elif os.path.exists(of_nodes):
            self.data_mode = "node_label"
            kinds = torch.from_numpy(loadtxt(of_nodes, ",", np.int64)[:, 0])
            rows = torch.nn.functional.one_hot(kinds - kinds.min()).float()
        else:
            self.data_mode = "constant"
            rows = torch.ones(whole.num_nodes(), self.hidden_size)
            self._say(f"Use Constant one as Feature with hidden size {self.hidden_size}")
        whole.ndata["feat"] = rows
        if self.max_allow_node:
            few = [i for i, nodes in enumerate(self._nodes) if len(nodes) <= self.max_allow_node]
            self._nodes = [self._nodes[i] for i in few]
            self.graph_labels = self.graph_labels[few]
            self.max_num_node = self.max_allow_node


class GINDataset(LocalDataset):
    """Graphs with a label each, of "How Powerful are Graph Neural Networks?".

    Source: Xu, Hu, Leskovec and Jegelka, ICLR 2019, https://arxiv.org/abs/1810.00826. Read is
    ``dataset/NAME/NAME.txt``. Nodes have ``label``, and ``attr``: the file's numbers, or else the
    label as a one-hot row.
    """

    def __init__(
        self,
        name: str,
        self_loop: bool,
        degree_as_nlabel: bool = False,
        raw_dir: _Folder = None,
        force_reload: bool = False,
        verbose: bool = False,
        transform: _Transform = None,
    ) -> None:
        self.self_loop, self.degree_as_nlabel = self_loop, degree_as_nlabel
        self.graphs: list[Graph] = []
        self.glabel_dict: dict[int, int] = {}
        self.nlabel_dict: dict[int, int] = {}
        url = "https://raw.githubusercontent.com/weihua916/powerful-gnns/master/dataset.zip"
        hash_key = (name, self_loop, degree_as_nlabel)
        super().__init__(name, url, raw_dir, hash_key, force_reload, verbose, transform)

    def process(self) -> None:
        files = [f"{way}{self.name}.txt" for way in (f"dataset/{self.name}/", f"{self.name}/", "")]
        folder = self._folder_with(*([f] for f in files), folder_names=["GINDataset", self.name])
        path = next(folder / file for file in files if (folder / file).is_file())
        lines = iter(read_text_regular(path).splitlines())
        labels: list[int] = []
        try:
            for _ in range(int(next(lines))):
                num_nodes, label = (int(word) for word in next(lines).split())
                labels.append(self.glabel_dict.setdefault(label, len(self.glabel_dict)))
                self.graphs.append(self._graph([next(lines).split() for _ in range(num_nodes)]))
        except (StopIteration, ValueError, IndexError) as error:
            raise GraphValueError(f"{path} cannot be read ({error}); get it again") from None
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.N, self.gclasses = len(labels), len(self.glabel_dict)
        self.n = sum(g.num_nodes() for g in self.graphs)
        self.m = sum(g.num_edges() for g in self.graphs)
        self.nlabels_flag = len(self.nlabel_dict) > 1
        self.nattrs_flag = any("attr" in g.ndata for g in self.graphs)
        if not self.nattrs_flag:
            self._labels_as_attributes()
        self.nclasses, self.eclasses = len(self.nlabel_dict), 0
        self.dim_nfeats = int(self.graphs[0].ndata["attr"].shape[1]) if self.graphs else 0
        self._say(f"{self.name}: {self.N} graphs of {self.gclasses} classes, {self.n} nodes")

    def _graph(self, rows: Sequence[Sequence[str]]) -> Graph:
        """Of a row for each node: its label, its degree, its neighbours, its attributes."""
        src: list[int] = []
        dst: list[int] = []
        labels, attributes = [], []
        for node, row in enumerate(rows):
            stop = int(row[1]) + 2
            if stop > len(row):
                raise ValueError(f"a node has {len(row) - 2} neighbours, not {row[1]}")
            neighbors = [int(word) for word in row[2:stop]] + [node] * self.self_loop
            src += [node] * len(neighbors)
            dst += neighbors
            labels.append(self.nlabel_dict.setdefault(int(row[0]), len(self.nlabel_dict)))
            if row[stop:]:
                attributes.append([float(word) for word in row[stop:]])
        g = graph((src, dst), num_nodes=len(rows))
        if attributes:
            g.ndata["attr"] = torch.tensor(attributes)
        g.ndata["label"] = torch.tensor(labels, dtype=torch.int64)
        return g

    def _labels_as_attributes(self) -> None:
        if self.degree_as_nlabel:
            for g in self.graphs:
                g.ndata["label"] = g.in_degrees()
        used = sorted({label for g in self.graphs for label in g.ndata["label"].tolist()})
        # DGL has columns in the order of the file's labels where those are 0 to n - 1 themselves
        given = all(label in self.nlabel_dict for label in used) and used == list(range(len(used)))
        column = self.nlabel_dict if given else {label: i for i, label in enumerate(used)}
        for g in self.graphs:
            columns = torch.tensor([column[label] for label in g.ndata["label"].tolist()])
            g.ndata["attr"] = torch.nn.functional.one_hot(columns, len(column)).float()

    @property
    def num_classes(self) -> int:
        """Number of classes of graphs."""
        return self.gclasses

    def __getitem__(self, idx: int) -> tuple[Any, Tensor]:
        return self._transformed(self.graphs[idx]), self.labels[idx]

    def __len__(self) -> int:
        return len(self.graphs)


class PPIDataset(LocalDataset):
    """Graphs of proteins with several of 121 labels: 20 to train, 2 to validate, 2 to test on.

    Source: Zitnik and Leskovec, "Predicting multicellular function through multi-layer tissue
    networks", Bioinformatics 2017. Read are ``MODE_graph.json``, ``MODE_feats.npy``,
    ``MODE_labels.npy`` and ``MODE_graph_id.npy``.
    """

    num_labels = 121

    def __init__(
        self,
        mode: str = "train",
        raw_dir: _Folder = None,
        force_reload: bool = False,
        verbose: bool = False,
        transform: _Transform = None,
    ) -> None:
        if mode not in _PPI_GRAPHS:
            raise GraphValueError(f"mode must be one of {list(_PPI_GRAPHS)} (got {mode!r})")
        self.mode = mode
        url = get_dgl_url("dataset/ppi.zip")
        super().__init__("ppi", url, raw_dir, (), force_reload, verbose, transform)

    def process(self) -> None:
        import networkx
        from networkx.readwrite import json_graph

        ends = ("graph.json", "feats.npy", "labels.npy", "graph_id.npy")
        files = [f"{self.mode}_{end}" for end in ends]
        folder = self._folder_with(files)
        stored = read_json_regular(folder / files[0])
        edges = stored.get("links", stored.get("edges"))
        whole = json_graph.node_link_graph(stored | {"links": edges, "edges": edges})
        self.graph = from_networkx(networkx.DiGraph(whole))
        self._feats, self._labels, owner = (
            np.load(folder / file, allow_pickle=False) for file in files[1:]
        )
        self.graphs = []
        for number in range(*_PPI_GRAPHS[self.mode]):
            is_own = owner == number
            g = node_subgraph(self.graph, torch.from_numpy(is_own.nonzero()[0]))
            g.ndata["feat"] = torch.from_numpy(self._feats[is_own]).float()
            g.ndata["label"] = torch.from_numpy(self._labels[is_own]).float()
            self.graphs.append(g)

    def __getitem__(self, item: int) -> Any:
        """A graph, with ``feat`` and ``label``."""
        return self._transformed(self.graphs[item])

    def __len__(self) -> int:
        return len(self.graphs)


_PPI_GRAPHS = {"train": (1, 21), "valid": (21, 23), "test": (23, 25)}


class LegacyPPIDataset(PPIDataset):
    """`PPIDataset` whose items are (graph, features, labels)."""

    def __getitem__(self, item: int) -> Any:
        """A graph, its features, its labels."""
        g = super().__getitem__(item)
        return g, g.ndata["feat"], g.ndata["label"]


class QM9Dataset(LocalDataset):
    """134,000 molecules, whose atoms are joined where they are near, with 12 numbers to predict.

    Source: Klicpera, Groß and Günnemann, "Directional Message Passing for Molecular Graphs", ICLR
    2020, https://arxiv.org/abs/2003.03123. Read is ``qm9_eV.npz`` in ``raw_dir``. Nodes have ``R``
    (place) and ``Z`` (atomic number).
    """

    def __init__(
        self,
        label_keys: Sequence[str],
        cutoff: float = 5.0,
        raw_dir: _Folder = None,
        force_reload: bool = False,
        verbose: bool = False,
        transform: _Transform = None,
    ) -> None:
        self.label_keys, self.cutoff = label_keys, cutoff
        url = get_dgl_url("dataset/qm9_eV.npz")
        super().__init__("qm9", url, raw_dir, (), force_reload, verbose, transform)

    def process(self) -> None:
        path = self._folder_with(["qm9_eV.npz"]) / "qm9_eV.npz"
        stored = _arrays(path, ["N", "R", "Z", *self.label_keys])
        self.N, self.R, self.Z = (stored[name] for name in "NRZ")
        self.label = np.stack([stored[key] for key in self.label_keys], axis=1)
        self.N_cumsum = np.concatenate([[0], np.cumsum(self.N)])

    @property
    def num_labels(self) -> int:
        """Number of numbers to predict."""
        return int(self.label.shape[1])

    num_tasks = num_labels

    def __getitem__(self, idx: int) -> tuple[Any, Tensor]:
        atoms = slice(self.N_cumsum[idx], self.N_cumsum[idx + 1])
        positions = self.R[atoms]
        distance = np.linalg.norm(positions[:, None] - positions[None], axis=-1)
        near = (distance <= self.cutoff) & ~np.eye(len(positions), dtype=bool)
        src, dst = torch.from_numpy(near).nonzero().int().T  # DGL's ids are int32 here
        g = to_bidirected(graph((src, dst), num_nodes=len(positions)))
        g.ndata["R"] = torch.from_numpy(positions).float()
        g.ndata["Z"] = torch.from_numpy(self.Z[atoms]).long()
        return self._transformed(g), torch.from_numpy(self.label[idx]).float()

    def __len__(self) -> int:
        return int(self.label.shape[0])


class QM9EdgeDataset(LocalDataset):
    """130,831 molecules with their bonds, and 19 numbers to predict.

    Source: Gilmer et al., "Neural Message Passing for Quantum Chemistry", ICML 2017,
    https://arxiv.org/abs/1704.01212. Read is ``qm9_edge.npz`` in ``raw_dir``. Nodes have ``pos``
    and ``attr``, edges ``edge_attr``.
    """

    keys = "mu alpha homo lumo gap r2 zpve U0 U H G Cv U0_atom U_atom H_atom G_atom A B C".split()
    map_dict = {key: column for column, key in enumerate(keys)}  # noqa: RUF012 (as DGL has it)

    def __init__(
        self,
        label_keys: Sequence[str] | None = None,
        raw_dir: _Folder = None,
        force_reload: bool = False,
        verbose: bool = True,
        transform: _Transform = None,
    ) -> None:
        self.label_keys = None if label_keys is None else [self.map_dict[k] for k in label_keys]
        self.num_labels = self.num_tasks = len(self.keys if label_keys is None else label_keys)
        url = get_dgl_url("dataset/qm9_edge.npz")
        super().__init__("qm9Edge", url, raw_dir, (), force_reload, verbose, transform)

    def process(self) -> None:
        self._path = self._folder_with(["qm9_edge.npz"]) / "qm9_edge.npz"
        names = "n_node n_edge node_attr node_pos edge_attr src dst targets".split()
        arrays = _arrays(self._path, names)
        self.n_node, self.n_edge, self.node_attr, self.node_pos = (arrays[n] for n in names[:4])
        self.edge_attr, self.src, self.dst, self.targets = (arrays[n] for n in names[4:])
        self.n_cumsum = np.concatenate([[0], np.cumsum(self.n_node)])
        self.ne_cumsum = np.concatenate([[0], np.cumsum(self.n_edge)])

    @property
    def npz_path(self) -> str:
        """The file."""
        return str(self._path)

    def __getitem__(self, idx: int) -> tuple[Any, Tensor]:
        atoms = slice(self.n_cumsum[idx], self.n_cumsum[idx + 1])
        bonds = slice(self.ne_cumsum[idx], self.ne_cumsum[idx + 1])
        ends = (torch.from_numpy(side[bonds].astype(np.int64)) for side in (self.src, self.dst))
        g = graph(tuple(ends), num_nodes=int(self.n_node[idx]))
        g.ndata["pos"] = torch.from_numpy(self.node_pos[atoms]).float()
        g.ndata["attr"] = torch.from_numpy(self.node_attr[atoms]).float()
        g.edata["edge_attr"] = torch.from_numpy(self.edge_attr[bonds]).float()
        label = torch.from_numpy(self.targets[idx]).float()
        if self.label_keys is not None:
            label = label[self.label_keys]
        return self._transformed(g), label

    def __len__(self) -> int:
        return len(self.n_node)


def _arrays(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    stored = read_npz(path, names.__contains__)
    if absent := [name for name in names if name not in stored]:
        raise GraphValueError(f"{path} has no arrays {', '.join(absent)}")
    return stored


class SSTDataset(LocalDataset):
    """Sentences of film reviews as trees, every phrase with one of 5 moods.

    Source: Socher et al., "Recursive Deep Models for Semantic Compositionality Over a Sentiment
    Treebank", EMNLP 2013. Read are ``MODE.txt`` and ``vocab.txt``. Edges go from phrase to the
    phrase that it is part of, node 0 at last. Nodes have ``x`` (number of the word, -1 for phrases
    and unknown words), ``y`` (mood) and ``mask`` (1 for words).

    Args:
        glove_embed_file: Vectors of words, for ``pretrained_emb``; read for ``"train"`` only.
    """

    PAD_WORD = -1
    UNK_WORD = -1
    num_classes = 5

    def __init__(
        self,
        mode: str = "train",
        glove_embed_file: str | None = None,
        vocab_file: str | None = None,
        raw_dir: _Folder = None,
        force_reload: bool = False,
        verbose: bool = False,
        transform: _Transform = None,
    ) -> None:
        if mode not in ("train", "dev", "test", "tiny"):
            raise GraphValueError(f"mode must be train, dev, test or tiny (got {mode!r})")
        self.mode, self._vocab_file = mode, vocab_file
        self._glove_embed_file = glove_embed_file if mode == "train" else None
        url = get_dgl_url("dataset/sst.zip")
        super().__init__("sst", url, raw_dir, (), force_reload, verbose, transform)

    def process(self) -> None:
        files = [f"{self.mode}.txt"] + ["vocab.txt"] * (self._vocab_file is None)
        folder = self._folder_with(files)
        words = read_text_regular(self._vocab_file or folder / "vocab.txt").splitlines()
        self.vocab: OrderedDict[str, int] = OrderedDict()
        for word in words:
            self.vocab[word.strip()] = len(self.vocab)
        self.pretrained_emb = self._vectors()
        lines = read_text_regular(folder / files[0]).splitlines()
        self.trees = [self._tree(line) for line in lines if line.strip()]

    def _vectors(self) -> Tensor | None:
        """A vector for each word: of the file, or drawn by NumPy's generator."""
        if self._glove_embed_file is None or not os.path.exists(self._glove_embed_file):
            return None
        vectors: dict[str, np.ndarray] = {}
        for line in read_text_regular(self._glove_embed_file).splitlines():
            word, *numbers = line.split(" ")
            if word.lower() in self.vocab:
                vectors[word.lower()] = np.array([float(number) for number in numbers])
        drawn = np.random.uniform(-0.05, 0.05, (len(self.vocab), 300))
        rows = [vectors.get(w.lower(), row) for w, row in zip(self.vocab, drawn, strict=True)]
        return torch.from_numpy(np.stack(rows))

    def _tree(self, line: str) -> Graph:
        """Of ``(3 (2 It) (4 (2 is) (4 good)))``: a node for each pair of brackets."""
        parents: list[int] = []
        words: list[str | None] = []
        moods: list[int] = []
        opened: list[int] = []
        tokens = iter(line.replace("(", " ( ").replace(")", " ) ").split())
        try:
            for token in tokens:
                if token == "(":
                    parents.append(opened[-1] if opened else -1)
                    opened.append(len(moods))
                    moods.append(int(next(tokens)))
                    words.append(None)
                elif token == ")":
                    opened.pop()
                else:
                    words[opened[-1]] = token
        except (StopIteration, ValueError, IndexError):
            raise GraphValueError(f"this line is no tree: {line[:60]!r}") from None
        src = torch.arange(1, len(moods))
        g = graph((src, torch.tensor(parents[1:], dtype=torch.int64)), num_nodes=len(moods))
        numbers = [
            self.PAD_WORD if word is None else self.vocab.get(word.lower(), self.UNK_WORD)
            for word in words
        ]
        g.ndata["x"] = torch.tensor(numbers, dtype=torch.int64)
        g.ndata["y"] = torch.tensor(moods, dtype=torch.int64)
        g.ndata["mask"] = torch.tensor([int(word is not None) for word in words])
        return g

    @property
    def vocab_size(self) -> int:
        """Number of words."""
        return len(self.vocab)

    def __getitem__(self, idx: int) -> Any:
        return self._transformed(self.trees[idx])

    def __len__(self) -> int:
        return len(self.trees)


QM9 = QM9Dataset
QM9Edge = QM9EdgeDataset
SST = SSTDataset
