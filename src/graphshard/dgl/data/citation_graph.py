# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.data.citation_graph``: Cora, Citeseer and Pubmed with the Planetoid splits.

Source: Yang, Cohen and Salakhutdinov, "Revisiting Semi-Supervised Learning with Graph
Embeddings", ICML 2016, https://arxiv.org/abs/1603.08861.

The files ``ind.<name>.<part>`` are pickles, which are programs. `read_planetoid` never runs one. It
knows the few instructions by which a NumPy array, a SciPy CSR matrix, a dictionary of lists and
plain numbers and strings are written down, and builds those and nothing else: a name outside
`_NAMES`, an instruction that is not in `PickleMachine`, an array of objects, or a length that the
file does not have is an error. So what is built is never larger than the file.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..._base.files import open_regular, read_text_regular
from ..._base.pickled import PickleMachine
from ...data import load_dataset
from ...errors import GraphValueError
from ...graph import Graph, graph
from ..graphs._order import by_destination
from .dgl_dataset import OneGraphDataset, find_folder, saved_graph

__all__ = [
    "CitationGraphDataset", "CiteseerGraphDataset", "CoraGraphDataset", "PubmedGraphDataset",
    "load_citeseer", "load_cora", "load_pubmed",
]  # fmt: skip

_PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
_ARRAYS = ("edge_index.npy", "label.npy", "train_idx.npy", "test_idx.npy")
_FOLDERS = {"cora": "cora_v2", "citeseer": "citeseer", "pubmed": "pubmed"}
_NUM_VALID = 500


class CitationGraphDataset(OneGraphDataset):
    """Cora, Citeseer or Pubmed: papers, who cites whom, words, and the fields they are in.

    The first of these that is there is read:

    * the eight files of Planetoid, ``ind.cora.x`` and so on (of the name ``cora_v2`` too), which
      are read without running them;
    * what DGL has saved, ``cora_v2_dgl_graph.bin``;
    * a folder of arrays as `load_dataset` reads it, in which edges come in another order. That of
      Cora comes with the package, and is read where no ``raw_dir`` is given and DGL's has none.

    Features are divided by the sum of their row.

    Args:
        reverse_edge: Have both directions of every edge; of arrays, leave them as they are.
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
        if self._title not in _FOLDERS:
            raise GraphValueError(f"name must be one of {list(_FOLDERS)} (got {name!r})")
        self._reverse_edge, self._reorder = reverse_edge, reorder
        self._own_folder = raw_dir is not None
        self._saved_name = f"{_FOLDERS[self._title]}_dgl_graph.bin"
        super().__init__(_FOLDERS[self._title], None, raw_dir, (), force_reload, verbose, transform)

    def process(self) -> None:
        titles = sorted({self._title, self.name})
        planetoid = [[f"ind.{title}.{part}" for part in _PARTS] for title in titles]
        saved = [] if self._force_reload or not self._reverse_edge else [[self._saved_name]]
        folder = find_folder(self.raw_dir, titles, [*planetoid, *saved, _ARRAYS])
        if folder is not None:
            g = self._read(folder, titles)
        elif self._title == "cora" and not self._own_folder:
            g = _from_arrays("cora", self._reverse_edge)
        else:
            raise FileNotFoundError(
                f"{self._title} is not downloaded: put the Planetoid files "
                f"ind.{self._title}.{{{','.join(_PARTS)}}}, DGL's {self._saved_name}, or a folder "
                f"of arrays ({', '.join(_ARRAYS)}, feat.npz) into "
                f"{Path(self.raw_dir) / self._title}"
            )
        self._g = by_destination(g) if self._reorder else g
        self._num_classes = int(g.ndata["label"].max()) + 1 if g.num_nodes() else 0
        self._say(
            f"{self._title}: {g.num_nodes()} nodes, {g.num_edges()} edges, "
            f"{g.ndata['feat'].shape[1]} features, {self._num_classes} classes"
        )

    def _read(self, folder: Path, titles: list[str]) -> Graph:
        for title in titles:
            if (folder / f"ind.{title}.x").is_file():
                return _from_planetoid(folder, title, self._reverse_edge)
        if (folder / self._saved_name).is_file() and not self._force_reload:
            return saved_graph(folder / self._saved_name)
        return _from_arrays(folder, self._reverse_edge)

    @property
    def num_classes(self) -> int:
        """Number of fields."""
        return self._num_classes

    num_labels = num_classes

    @property
    def reverse_edge(self) -> bool:
        return self._reverse_edge


class _OneOfThem(CitationGraphDataset):
    _of: str

    def __init__(
        self,
        raw_dir: str | os.PathLike[str] | None = None,
        force_reload: bool = False,
        verbose: bool = True,
        reverse_edge: bool = True,
        transform: Callable[[Graph], Any] | None = None,
        reorder: bool = False,
    ) -> None:
        super().__init__(self._of, raw_dir, force_reload, verbose, reverse_edge, transform, reorder)


class CoraGraphDataset(_OneOfThem):
    """Cora, 2,708 papers of 7 fields; see `CitationGraphDataset` for arguments."""

    _of = "cora"


class CiteseerGraphDataset(_OneOfThem):
    """Citeseer, 3,327 papers of 6 fields; see `CitationGraphDataset` for arguments."""

    _of = "citeseer"


class PubmedGraphDataset(_OneOfThem):
    """Pubmed, 19,717 papers of 3 fields; see `CitationGraphDataset` for arguments."""

    _of = "pubmed"


# As DGL's older scripts ask for them.
load_cora, load_citeseer = CoraGraphDataset, CiteseerGraphDataset
load_pubmed = PubmedGraphDataset


def _from_arrays(source: str | Path, reverse_edge: bool) -> Graph:
    g = load_dataset(source, row_normalize=True, dtype=torch.float32).graph
    if reverse_edge:
        return g
    src, dst = g.edges()
    upward = src <= dst
    one_way = graph((src[upward], dst[upward]), num_nodes=g.num_nodes())
    one_way.ndata.update(g.ndata)
    return one_way


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

    num_given, ascending = parts["allx"].shape[0], np.sort(test)
    if len(test) == 0 or ascending[0] != num_given or len(np.unique(test)) != len(test):
        raise ValueError(f"test.index must name nodes from {num_given} on, each once")
    num_nodes = int(ascending[-1]) + 1  # some may be in no file: Citeseer's have no words
    if num_nodes > 100 * (num_given + len(test)) or parts["tx"].shape[0] != len(test):
        raise ValueError(f"test.index names {len(test)} nodes up to {num_nodes - 1}")
    given = scipy.sparse.coo_matrix(parts["allx"])
    of_test = scipy.sparse.coo_matrix(parts["tx"])
    rows = np.concatenate([given.row, test[of_test.row]])
    columns = np.concatenate([given.col, of_test.col])
    words = np.concatenate([given.data, of_test.data]).astype(np.float64)
    width = parts["allx"].shape[1]
    features = scipy.sparse.csr_matrix((words, (rows, columns)), shape=(num_nodes, width))
    sums = np.asarray(features.sum(1)).reshape(-1)
    scale = np.divide(1.0, sums, out=np.zeros_like(sums), where=sums != 0)
    dense = scipy.sparse.diags(scale).dot(features).toarray().astype(np.float32)
    one_hot = np.zeros((num_nodes, parts["ally"].shape[1]))
    one_hot[:num_given] = parts["ally"]
    one_hot[test] = parts["ty"]
    src, dst = _edges(parts["graph"], reverse_edge)
    g = graph((src, dst), num_nodes=max([num_nodes - 1, *src, *dst]) + 1)
    if g.num_nodes() != num_nodes:
        raise ValueError(f"graph names nodes up to {g.num_nodes() - 1}, not {num_nodes - 1}")
    num_train = len(parts["y"])
    ids = torch.arange(num_nodes)
    g.ndata["train_mask"] = ids < num_train
    g.ndata["val_mask"] = (ids >= num_train) & (ids < num_train + _NUM_VALID)
    g.ndata["test_mask"] = torch.isin(ids, torch.from_numpy(test))
    g.ndata["label"] = torch.from_numpy(one_hot.argmax(1))
    g.ndata["feat"] = torch.from_numpy(dense)
    return g


def _edges(neighbors: dict[int, list[int]], reverse_edge: bool) -> tuple[list[int], list[int]]:
    """Edges once each, in the order in which NetworkX, and so DGL, has them."""
    adjacency: dict[int, dict[int, None]] = {node: {} for node in neighbors}
    for node, others in neighbors.items():
        for other in others:
            adjacency[node][other] = None
            adjacency.setdefault(other, {})[node] = None
    src, dst, seen = [], [], set()
    for node, others_of_node in adjacency.items():
        for other in others_of_node:
            if reverse_edge or other not in seen:
                src.append(node)
                dst.append(other)
        seen.add(node)
    return src, dst


_MAX_BYTES = 2**31
_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): "array",
    ("numpy._core.multiarray", "_reconstruct"): "array",
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("scipy.sparse.csr", "csr_matrix"): "csr",
    ("scipy.sparse._csr", "csr_matrix"): "csr",
    ("copy_reg", "_reconstructor"): "object",
    ("copyreg", "_reconstructor"): "object",
    ("__builtin__", "object"): "type object",
    ("builtins", "object"): "type object",
    ("__builtin__", "list"): "type list",
    ("builtins", "list"): "type list",
    ("collections", "defaultdict"): "defaultdict",
    ("_codecs", "encode"): "encode",
}
_DTYPE = re.compile(r"[<>|=]?(?:[iu][1248]|f[248]|b1)")


class PlanetoidFormatError(ValueError):
    """A file is no Planetoid file, or is damaged."""


@dataclass(eq=False)
class NameInFile:
    """What a name in the file stands for."""

    kind: str


@dataclass(eq=False)
class _Blank:
    """An array, a dtype or a matrix, before and after its state is known."""

    kind: str
    code: str = ""
    value: Any = None


def read_planetoid(path: str | Path) -> Any:
    """What a file holds: an array, a CSR matrix, or a dictionary from node to neighbours.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It holds anything else, or is damaged.
    """
    with open_regular(path) as file:
        data = file.read(_MAX_BYTES + 1)
    try:
        if len(data) > _MAX_BYTES:
            raise PlanetoidFormatError("it is too large")
        return _finished(_PlanetoidMachine(data).run())
    except (ValueError, TypeError, KeyError, IndexError, struct.error, OverflowError) as error:
        raise PlanetoidFormatError(
            f"{path} is not a Planetoid file that can be read ({error}); get it again"
        ) from None


class _PlanetoidMachine(PickleMachine):
    """Knows arrays, CSR matrices and dictionaries of lists."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._size, self._encoded = len(data), 0

    def named(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            return super().named(module, name)
        return NameInFile(_NAMES[module, name])

    def called(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        kind = function.kind if isinstance(function, NameInFile) else ""
        if kind == "encode":
            return self._encode(*arguments)
        if kind == "array":
            return _Blank("array")
        if kind == "dtype":
            code = _text(arguments[0])
            if not _DTYPE.fullmatch(code):
                raise ValueError(f"arrays of {code!r:.20} are none that these files have")
            return _Blank("dtype", code)
        of_object = arguments[0] if kind == "object" else function
        if isinstance(of_object, NameInFile) and of_object.kind == "csr":
            return _Blank("csr")
        if kind == "defaultdict":
            return {}
        return super().called(function, arguments)

    def stated(self, value: Any, state: Any) -> None:
        if not isinstance(value, _Blank):
            raise ValueError("a state of what has none")
        if value.kind == "dtype":
            order = _text(state[1])
            if order not in ("<", ">", "|", "="):
                raise ValueError("an unknown order of bytes")
            value.code = order + value.code.lstrip("<>|=")
        elif value.kind == "csr":
            if not isinstance(state, dict):
                raise ValueError("a matrix without its arrays")
            value.value = state
        else:
            value.value = _array_of(state)

    def _encode(self, text: Any, encoding: Any) -> bytes:
        """Bytes as Python 3 writes them; together never more than the file has."""
        self._encoded += len(text)
        if encoding != "latin1" or self._encoded > self._size:
            raise ValueError("bytes that are none")
        return str(text).encode("latin1")


def _array_of(state: Any) -> np.ndarray:
    _, shape, dtype, by_column, raw = state
    if not isinstance(dtype, _Blank) or dtype.kind != "dtype" or not isinstance(raw, bytes):
        raise ValueError("an array of objects")
    kind = np.dtype(dtype.code)
    if not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("an array of an unknown shape")
    if math.prod(shape) * kind.itemsize != len(raw):
        raise ValueError(f"an array of shape {shape} in {len(raw)} bytes")
    return np.frombuffer(raw, kind).reshape(shape, order="F" if by_column else "C")


def _finished(value: Any) -> Any:
    """An array or a matrix in the place of what stands for it, or a dictionary of lists of ids."""
    if isinstance(value, _Blank):
        return _matrix(value.value) if value.kind == "csr" else _array(value)
    if not isinstance(value, dict):
        raise ValueError(f"a value of type {type(value).__name__}")
    checked: set[int] = set()  # a list may be there for many keys
    for key, ids in value.items():
        if type(ids) is not list or type(key) is not int:
            raise ValueError("a dictionary of something else than lists")
        if id(ids) not in checked and any(type(node) is not int for node in ids):
            raise ValueError("a list of something else than ids")
        checked.add(id(ids))
    return value


def _array(blank: Any) -> Any:
    if not isinstance(blank, _Blank) or not isinstance(blank.value, np.ndarray):
        raise ValueError("an array without a state")
    return blank.value.astype(blank.value.dtype.newbyteorder("="))


def _matrix(state: Any) -> Any:
    import scipy.sparse

    if not isinstance(state, dict):
        raise ValueError("a matrix without a state")
    named = {_text(key): value for key, value in state.items()}
    shape = named.get("_shape", named.get("shape"))
    if not isinstance(shape, tuple) or len(shape) != 2 or any(type(n) is not int for n in shape):
        raise ValueError("a matrix without a shape")
    indptr, indices, data = (_array(named[name]) for name in ("indptr", "indices", "data"))
    if not 0 <= shape[1] < 2**31 or indptr.shape != (shape[0] + 1,):
        raise ValueError(f"a matrix of shape {shape} with {indptr.shape} rows")
    matrix = scipy.sparse.csr_matrix((data, indices, indptr), shape=shape)
    matrix.check_format(full_check=True)
    return matrix


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
