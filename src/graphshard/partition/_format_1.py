# SPDX-License-Identifier: Apache-2.0
"""The structure of a part in format 1, and in DGL's files: with all that follows from it.

::

    coo/src coo/dst                        [local edges]   }
    csc/indptr csc/indices csc/eids        in-edges        } in one of these formats or several;
    csr/indptr csr/indices csr/eids        out-edges       } int32 or int64
    node/_ID node/_TYPE node/part_id node/inner_node       [local nodes]
    edge/_ID edge/_TYPE edge/inner_edge                    [local edges]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .._base.typing import INDEX_DTYPES
from ..ops import Adjacency
from ._book import RangePartitionBook
from .structure import PartStructure, check_foreign, is_within

_COLUMNS = {
    "node": {
        "_ID": torch.int64,
        "_TYPE": torch.int32,
        "part_id": torch.int64,
        "inner_node": torch.bool,
    },
    "edge": {"_ID": torch.int64, "_TYPE": torch.int32, "inner_edge": torch.bool},
}


def read_columns(tensors: Mapping[str, Tensor], book: RangePartitionBook) -> PartStructure:
    """The structure in the tensors of a file, all of it checked.

    Edges come from the stored format that would cost most to make from the others.

    Args:
        book: Who owns what, seen from the part.

    Raises:
        ValueError: It contradicts the book or itself.
        TypeError: A tensor has another dtype.
    """
    counts = {what: _count(tensors, what) for what in _COLUMNS}
    adjacency = _adjacency(tensors, counts["node"])
    if adjacency.num_edges != counts["edge"]:
        raise ValueError(f"it holds {adjacency.num_edges} edges and {counts['edge']} ids of edges")
    for sentence in _contradictions(tensors, book, counts):
        raise ValueError(sentence)
    halo = tensors["node/_ID"][book.local_ntype_offset[-1] :]
    outer = tensors["edge/_ID"][book.local_etype_offset[-1] :]
    check_foreign(halo, book, "node")
    check_foreign(outer, book, "edge")
    return PartStructure(book, adjacency, halo, outer, adjacency.idtype)


def check_formats_agree(tensors: Mapping[str, Tensor], adjacency: Adjacency) -> None:
    """Check that all formats in which a file holds the edges of a part hold the same ones."""
    expected = adjacency.coo()
    for name in ("csc", "csr", "coo"):
        alone = {k: v for k, v in tensors.items() if k.startswith(f"{name}/")}
        if alone:
            other = _adjacency(alone, adjacency.num_dst).coo()
            if not all(torch.equal(a, b) for a, b in zip(expected, other, strict=True)):
                raise ValueError(f"its edges in the format {name} are others than its edges")


def _count(tensors: Mapping[str, Tensor], what: str) -> int:
    """Number of local nodes or edges, after checking the columns."""
    count: int | None = None
    for name, dtype in _COLUMNS[what].items():
        key = f"{what}/{name}"
        if key not in tensors:
            raise ValueError(f"'{key}' is missing")
        column = tensors[key]
        if column.dtype != dtype or column.dim() != 1:
            raise ValueError(
                f"'{key}' must be {dtype} with one dimension (got {column.dtype} of shape "
                f"{tuple(column.shape)})"
            )
        if count not in (None, column.numel()):
            raise ValueError(f"'{key}' has {column.numel()} rows and another column has {count}")
        count = column.numel()
    assert count is not None
    return count


def _adjacency(tensors: Mapping[str, Tensor], num_nodes: int) -> Adjacency:
    for name in ("csc", "csr"):
        if f"{name}/indptr" in tensors:
            if f"{name}/indices" not in tensors:
                raise ValueError(f"'{name}/indices' is missing")
            adjacency = Adjacency.from_csc(
                tensors[f"{name}/indptr"],
                tensors[f"{name}/indices"],
                tensors.get(f"{name}/eids"),
                num_nodes,
                num_nodes,
            )
            return adjacency if name == "csc" else adjacency.reverse()
    ends = []
    for name in ("coo/src", "coo/dst"):
        if name not in tensors:
            raise ValueError(f"'{name}' is missing, and there is no other format")
        ids = tensors[name]
        if ids.dtype not in INDEX_DTYPES or ids.dim() != 1:
            raise ValueError(f"'{name}' must be int32 or int64 with one dimension")
        if not is_within(ids, num_nodes):
            raise ValueError("an edge ends outside the part")
        ends.append(ids)
    if ends[0].dtype != ends[1].dtype or ends[0].shape != ends[1].shape:
        raise ValueError("'coo/src' and 'coo/dst' must be alike")
    return Adjacency(ends[0], ends[1], num_nodes, num_nodes, check=False)


def _contradictions(
    tensors: Mapping[str, Tensor], book: RangePartitionBook, counts: Mapping[str, int]
) -> Iterator[str]:
    sizes = book.metadata()[book.partid]
    spaces = {"node": book.local_ntype_offset, "edge": book.local_etype_offset}
    totals = {"node": book.num_nodes(), "edge": book.num_edges()}
    for what, num_ids in totals.items():
        inner, count = sizes[f"num_{what}s"], counts[what]
        if count < inner:
            yield f"it holds {count} {what}s, fewer than the {inner} that the part owns"
        flags = tensors[f"{what}/inner_{what}"]
        if not bool(flags[:inner].all()) or bool(flags[inner:].any()):
            yield f"inner_{what} does not mark exactly the first {inner} {what}s"
        ids = tensors[f"{what}/_ID"]
        if not is_within(ids, num_ids):
            yield f"a global {what} id is not in [0, {num_ids})"
        start = sum(before[f"num_{what}s"] for before in book.metadata()[: book.partid])
        if not torch.equal(ids[:inner], torch.arange(start, start + inner)):
            yield f"its inner {what}s are not those of {what}_map"
        if not _types_agree(tensors[f"{what}/_TYPE"], ids[inner:], spaces[what], book, what):
            yield f"{what} types contradict {what}_map"
    inner, owners = sizes["num_nodes"], tensors["node/part_id"]
    halo = book.nid2partid(tensors["node/_ID"][inner:])
    if bool((owners[:inner] != book.partid).any()) or not torch.equal(owners[inner:], halo):
        yield "part_id contradicts node_map"


def _types_agree(
    types: Tensor, foreign: Tensor, offsets: list[int], book: RangePartitionBook, what: str
) -> bool:
    """Whether types of local nodes or edges are those of their ids; inner ones lie in blocks."""
    for type_id, (start, stop) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        if bool((types[start:stop] != type_id).any()):
            return False
    per_type = book.map_to_per_ntype if what == "node" else book.map_to_per_etype
    return bool((types[offsets[-1] :] == per_type(foreign)[0]).all())
