# SPDX-License-Identifier: Apache-2.0
"""Files of graphs, as ``dgl.save_graphs`` writes them.

::

    u64 0xDD2E4FF046B4A13F, u64 2 (version), u64 2 (typed graphs), u64 graphs, up to byte 4096
    u64 where the first graph is, labels: a list of named tensors
    the graphs, see `_stored_graph`
    u64 bytes of what follows but the last number, list of u64: where each graph is, u64 the same

So says DGL's ``src/graph/serialize/graph_serialize.cc``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..._base.typing import TensorDict
from .._graph import Graph
from ._binary import BinaryReader, DamagedFileError, StoredTensor, dgl_dtype, new_file, reading
from ._stored_graph import FORMATS, StoredGraph, read_graph, write_graph
from ._tensors import check_tensors

_GRAPHS = 0xDD2E4FF046B4A13F
_VERSION = 2
_TYPED = 2
_HEAD_BYTES = 4096


def save_graphs(
    filename: str | os.PathLike[str],
    g_list: Graph | Sequence[Graph],
    labels: Mapping[str, Tensor] | None = None,
    formats: str | Sequence[str] | None = None,
) -> None:
    """Write graphs, features included, as ``dgl.save_graphs`` does, without DGL.

    Args:
        filename: File to write; one that is there is replaced, its folder is made if need be.
        g_list: A graph, or several; plain or typed, on any device.
        labels: Tensors that belong to the file as a whole.
        formats: Which of "coo", "csr" and "csc" to store; by default "coo".

    Raises:
        TypeError: ``g_list`` holds something else; or a tensor has a dtype that DGL's files cannot
            hold (bool becomes uint8 there).
        ValueError: An unknown format, or ``filename`` is a folder.
        OSError: The file cannot be written, such as on a full disk; names it.

    Example:
        >>> from graphshard import graph
        >>> save_graphs("path.dgl", graph(([0, 1], [1, 2])), {"label": torch.tensor([7])})
        >>> graphs, labels = load_graphs("path.dgl")
        >>> graphs[0].num_nodes(), labels["label"].item()
        (3, 7)
    """
    graphs = [g_list] if isinstance(g_list, Graph) else list(g_list)
    labels = {} if labels is None else labels
    chosen = ("coo",) if formats is None else formats
    chosen = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    if not chosen or not set(chosen) <= set(FORMATS):
        raise ValueError(f"formats must be some of {tuple(FORMATS)}, or None (got {formats!r})")
    check_tensors(labels, "labels")
    for graph in graphs:
        if not isinstance(graph, Graph):
            raise TypeError(
                f"g_list must be a Graph or a list of them (got {type(graph).__name__})"
            )
        for ntype in graph.ntypes:
            check_tensors(dict(graph.nodes[ntype].data), f"data of nodes of type {ntype!r}")
        for etype in graph.canonical_etypes:
            check_tensors(dict(graph.edges[etype].data), f"data of edges of {etype}")
    with new_file(filename) as writer:
        writer.u64(_GRAPHS, _VERSION, _TYPED, len(graphs))
        writer.raw(bytes(_HEAD_BYTES - writer.place))
        label_bytes = 8 + sum(
            8 + len(name.encode()) + 40 + 8 * t.dim() + t.numel() * dgl_dtype(t.dtype).itemsize
            for name, t in labels.items()
        )
        writer.u64(_HEAD_BYTES + 8 + label_bytes)
        writer.named_tensors(labels)
        places = []
        for graph in graphs:
            places.append(writer.place)
            write_graph(writer, graph, chosen)
        writer.u64(8 + 8 * len(places), len(places), *places, 8 + 8 * len(places))


def load_graphs(
    filename: str | os.PathLike[str], idx_list: Sequence[int] | None = None
) -> tuple[list[Graph], TensorDict]:
    """Read graphs from a file that ``save_graphs``, DGL's or ours, wrote; without DGL.

    Args:
        filename: The file.
        idx_list: Which graphs; by default all.

    Returns:
        The graphs, and the labels of the file by name.

    Raises:
        FileNotFoundError: There is no such file.
        IndexError: There is no graph of a number.
        ValueError: It is damaged, no such file, or of a version that DGL before 0.5 wrote.
    """
    with reading(filename) as reader:
        labels, places = open_graphs(reader)
        num_graphs = len(places) - 1
        wanted = range(num_graphs) if idx_list is None else idx_list
        graphs = []
        for number in wanted:
            if not 0 <= number < num_graphs:
                raise IndexError(
                    f"idx_list must name graphs of {filename}, in [0, {num_graphs}) (got {number})"
                )
            graphs.append(stored_graph(reader, places, number).load())
        return graphs, {name: stored.read() for name, stored in labels.items()}


def load_labels(filename: str | os.PathLike[str]) -> TensorDict:
    """Read the labels alone of a file of graphs.

    Args:
        filename: The file.

    Returns:
        Name to tensor.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: As for `load_graphs`.
    """
    with reading(filename) as reader:
        return {name: stored.read() for name, stored in open_graphs(reader)[0].items()}


def open_graphs(reader: BinaryReader) -> tuple[dict[str, StoredTensor], list[int]]:
    """The labels of an open file, and where its graphs begin and the last one ends."""
    reader.magic(_GRAPHS, "a file of graphs")
    version, kind = reader.u64(), reader.u64()
    if (version, kind) != (_VERSION, _TYPED):
        raise DamagedFileError(
            f"it is of version {version} and kind {kind}, not {_VERSION} and {_TYPED}; read it "
            "with DGL 0.5 or later and save it anew"
        )
    num_graphs = reader.u64()
    index_bytes = 8 + 8 * num_graphs
    if _HEAD_BYTES + 16 + index_bytes + 16 > reader.size:
        raise DamagedFileError(f"its {reader.size} bytes cannot hold {num_graphs} graphs")
    reader.go_to(_HEAD_BYTES)
    start = reader.u64()
    labels = reader.named_tensors()
    if reader.place != start:
        raise DamagedFileError(f"its labels end at {reader.place} and its graphs begin at {start}")
    end = reader.size - index_bytes - 16
    reader.go_to(end)
    said = reader.u64(), reader.u64()
    places = [reader.u64() for _ in range(num_graphs)]
    if (*said, reader.u64()) != (index_bytes, num_graphs, index_bytes):
        raise DamagedFileError("its list of graphs contradicts itself")
    places.append(end)
    if places[0] != start or any(a >= b for a, b in zip(places[:-1], places[1:], strict=True)):
        raise DamagedFileError("its graphs overlap")
    return labels, places


def stored_graph(reader: BinaryReader, places: Sequence[int], number: int) -> StoredGraph:
    """One graph of an open file; ``places`` as `open_graphs` gives them."""
    reader.go_to(places[number])
    found = read_graph(reader)
    if reader.place != places[number + 1]:
        raise DamagedFileError(f"graph {number} ends at {reader.place}")
    return found
