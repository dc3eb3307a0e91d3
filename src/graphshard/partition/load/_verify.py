# SPDX-License-Identifier: Apache-2.0
"""verify_partition: reads everything, believes nothing."""

from __future__ import annotations

import os

import numpy as np
import torch

from ..._base.typing import TensorDict
from ...errors import PartitionFormatError
from ...graph import Graph
from .._book import RangePartitionBook
from .._relabel import IdArray
from ..files import digest_of
from ..format import PART_FILES, PartitionConfig, etype_key, read_config
from ._load import load_part
from ._part_check import check_formats_agree


def verify_partition(part_config: str | os.PathLike[str], *, checksums: bool = True) -> list[str]:
    """Check a partition thoroughly.

    Loading checks the JSON and the structure of a part; this reads every byte of every file.
    Checked are the JSON against itself, the checksum of every file, that every part holds the
    nodes and edges that the maps say, each edge of the graph once as an inner edge, that copies of
    foreign nodes and edges agree with their owners', that the original ids are a permutation, and
    the statistics. ``graphshard verify`` also checks the description of the task beside the JSON.

    Of a partition that DGL wrote there are neither checksums nor statistics to compare with, and
    edges that leave a part need not be in it.

    Args:
        part_config: Path of the JSON that `partition_graph`, ours or DGL's, wrote.
        checksums: False skips the checksums, which need a pass over the features.

    Returns:
        What is wrong, one sentence each; empty if nothing is.
    """
    problems: list[str] = []
    try:
        config = read_config(part_config)
        config.check_format()
    except PartitionFormatError as error:
        return [str(error)]
    if checksums:
        problems += _check_digests(config)
    check = _Checker(config, problems)
    for part in range(config.num_parts):
        try:
            graph, node_feats, edge_feats, book, *_ = load_part(
                config, part, structure_digest=False
            )
            tensors = config.open_part(part, "part_graph").read()
            check_formats_agree(tensors, graph.adjacency())
        except ValueError as error:  # of which PartitionFormatError is one
            problems.append(f"part {part}: {error}")
            continue
        check.part(graph, book, node_feats, edge_feats)
    if not problems:  # these compare parts, so every part must make sense by itself
        check.copies()
        check.whole()
    return problems


def _check_digests(config: PartitionConfig) -> list[str]:
    problems = []
    for part in range(config.num_parts):
        for kind in PART_FILES:
            try:
                file = config.open_part(part, kind)
            except PartitionFormatError:
                continue  # reported when the part is loaded
            if file.blake2b is not None and digest_of(file.path) != file.blake2b:
                problems.append(f"part {part}: file {file.path} is damaged (its checksum differs)")
    return problems


class _Checker:
    """Collects problems, and what must be compared across parts."""

    def __init__(self, config: PartitionConfig, problems: list[str]) -> None:
        self.config = config
        self.problems = problems
        self.orig_ids: dict[str, list[IdArray]] = {}
        self.cut_edges = 0

    def _expect(self, part: int, condition: object, sentence: str) -> None:
        if not condition:
            self.problems.append(f"part {part}: {sentence}")

    def part(
        self, graph: Graph, book: RangePartitionBook, node_feats: TensorDict, edge_feats: TensorDict
    ) -> None:
        """Check one part by itself."""
        nodes, edges = _columns(graph, "n"), _columns(graph, "e")
        src, dst = (ids.numpy().astype(np.int64) for ids in graph.edges())
        self._check_edges(book, nodes, edges, src, dst)
        self._check_sizes(book.partid, nodes, edges)
        for kind, names, feats in (
            ("nodes of type", book.ntypes, node_feats),
            ("edges of", [etype_key(etype) for etype in book.canonical_etypes], edge_feats),
        ):
            for name in names:
                ids = feats[f"{name}/orig_id"].numpy()
                self.orig_ids.setdefault(f"{kind} {name}", []).append(ids)

    def _check_sizes(self, part: int, nodes: dict[str, IdArray], edges: dict[str, IdArray]) -> None:
        if self.config.stats is None:
            return
        said = self.config.stats.parts[part]
        inner_nodes, inner_edges = int(nodes["inner_node"].sum()), int(edges["inner_edge"].sum())
        for what, number, actual in (
            ("inner nodes", said.inner_nodes, inner_nodes),
            ("halo nodes", said.halo_nodes, nodes["_ID"].size - inner_nodes),
            ("inner edges", said.inner_edges, inner_edges),
            ("outer edges", said.outer_edges, edges["_ID"].size - inner_edges),
            (
                "bytes",
                said.bytes,
                sum(file.bytes or 0 for file in self.config.files[part].values()),
            ),
        ):
            sentence = f"the statistics say {number} {what}, but it has {actual}"
            self._expect(part, number == actual, sentence)

    def _check_edges(
        self,
        book: RangePartitionBook,
        nodes: dict[str, IdArray],
        edges: dict[str, IdArray],
        src: IdArray,
        dst: IdArray,
    ) -> None:
        part, owners = book.partid, nodes["part_id"]
        ntypes = book.ntypes
        ends = np.array([(ntypes.index(s), ntypes.index(d)) for s, _, d in book.canonical_etypes])
        actual = np.stack([nodes["_TYPE"][src], nodes["_TYPE"][dst]], axis=1)
        same = np.array_equal(ends[edges["_TYPE"]], actual)
        self._expect(part, same, "the ends of an edge have other types than its own")
        edge_owners = book.eid2partid(torch.from_numpy(edges["_ID"])).numpy()
        same = np.array_equal(edge_owners, owners[dst])
        self._expect(part, same, "an edge is not owned by the part of its destination")
        inner = int(edges["inner_edge"].sum())
        order = np.stack([edges["_TYPE"][:inner], dst[:inner]])
        ordered = np.array_equal(np.lexsort(order[::-1]), np.arange(inner))
        ordered |= not self.config.edges_by_destination
        self._expect(part, ordered, "inner edges are not ordered by type and destination")
        self.cut_edges += int((owners[src[:inner]] != part).sum())

    def copies(self) -> None:
        """Check that outer edges join the nodes that their owner says, and that none is missing."""
        num_edges = self.config.book(0).num_edges()
        src_of = np.full(num_edges, -1, dtype=np.int64)
        dst_of = np.full(num_edges, -1, dtype=np.int64)
        leaving = np.zeros(self.config.num_parts, dtype=np.int64)
        for inner in (True, False):
            for part in range(self.config.num_parts):
                graph, *_ = load_part(self.config, part, load_feats=False, structure_digest=False)
                nodes, edges = _columns(graph, "n"), _columns(graph, "e")
                mine = (edges["inner_edge"] == 1) == inner
                ends = [ids.numpy()[mine] for ids in graph.edges()]
                src, dst = (nodes["_ID"][ids] for ids in ends)
                ids = edges["_ID"][mine]
                owners = nodes["part_id"][ends[0]]
                if inner:
                    src_of[ids], dst_of[ids] = src, dst
                    leaving += np.bincount(owners[owners != part], minlength=leaving.shape[0])
                    continue
                same = np.array_equal(src_of[ids], src) and np.array_equal(dst_of[ids], dst)
                self._expect(part, same, "an outer edge joins other nodes than at its owner")
                if same and self.config.stats is not None and self.config.halo_hops:
                    complete = (owners == part).sum() == leaving[part]
                    self._expect(part, complete, "an edge that leaves it is missing")

    def whole(self) -> None:
        """Check what only all parts together can show."""
        for what, pieces in self.orig_ids.items():
            ids = np.concatenate(pieces)
            in_range = bool(((ids >= 0) & (ids < ids.shape[0])).all())
            if not in_range or bool((np.bincount(ids, minlength=ids.shape[0]) != 1).any()):
                self.problems.append(f"the original ids of the {what} are not a permutation")
        stats = self.config.stats
        if stats is not None and stats.edge_cut != self.cut_edges:
            self.problems.append(
                f"the statistics say that {stats.edge_cut} edges are cut, but {self.cut_edges} are"
            )


def _columns(graph: Graph, side: str) -> dict[str, IdArray]:
    data = graph.ndata if side == "n" else graph.edata
    return {name: data[name].numpy().astype(np.int64) for name in data.keys()}  # noqa: SIM118
