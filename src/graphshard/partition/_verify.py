# SPDX-License-Identifier: Apache-2.0
"""verify_partition: whether a partition is whole, looking at one part after another.

In memory are the structure of one part, that of another while copies of its edges are compared, and
a few numbers of each part.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import PartitionFormatError
from ._format_1 import check_formats_agree
from .checked_files import digest_of
from .dgl_folder import owned_rows
from .format import PART_FILES, PartitionConfig, read_config
from .load import load_features, load_structure, num_ids
from .structure import PartStructure, original_ids

_BLOCK = 1 << 20
_EDGES_AT_ONCE = 1 << 22


def verify_partition(part_config: str | os.PathLike[str], *, checksums: bool = True) -> list[str]:
    """Check a partition thoroughly, in memory for two of its parts.

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
    check = _Checker(config, problems)
    for part in range(config.num_parts):
        if checksums:
            problems += _check_digests(config, part)
        try:
            structure = load_structure(config, part, checksum=False)
            if config.version < 2:
                tensors = config.open_part(part, "part_graph").read()
                check_formats_agree(tensors, structure.adjacency)
            check.original_ids(part)
        except ValueError as error:  # of which PartitionFormatError is one
            problems.append(f"part {part}: {error}")
            continue
        check.part(structure)
    if not problems:  # these compare parts, so every part must make sense by itself
        check.copies()
        check.whole()
    return problems


def _check_digests(config: PartitionConfig, part: int) -> list[str]:
    problems = []
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
        #: Kind and type to the sum of the hashes of original ids, and how many there should be.
        self.hashes: dict[tuple[str, str], tuple[int, int]] = {}
        #: Edges [owner of the source, owner]: the owner's, and those that the source's part keeps.
        self.entering = np.zeros((config.num_parts, config.num_parts), dtype=np.int64)
        self.leaving = np.zeros_like(self.entering)
        #: Outer edges [part, owner].
        self.outer = np.zeros_like(self.entering)

    def _expect(self, part: int, condition: object, sentence: str) -> None:
        if not condition:
            self.problems.append(f"part {part}: {sentence}")

    def original_ids(self, part: int) -> None:
        """Read the original ids of one part."""
        book = self.config.book(part)
        for kind, what in (("node_feats", "nodes of type"), ("edge_feats", "edges of")):
            features = load_features(self.config, part, kind, as_stored=True)
            totals = num_ids(kind, book)
            for owner in owned_rows(kind, book):
                total, (before, _) = totals[owner], self.hashes.get((what, owner), (0, 0))
                pieces = features[f"{owner}/orig_id"].split(_BLOCK)
                sums = (_sum_of_hashes(original_ids(ids, total).numpy()) for ids in pieces)
                self.hashes[what, owner] = before + sum(sums), total

    def part(self, structure: PartStructure) -> None:
        """Check one part by itself."""
        self._check_sizes(structure)
        book, config = structure.book, self.config
        part, num_inner = book.partid, structure.num_inner_edges
        src, dst = structure.adjacency.coo()
        types = structure.node_types().to(torch.int16 if len(book.ntypes) < 2**15 else torch.int32)
        offsets, ntypes = book.local_etype_offset, book.ntypes
        have_types, are_ordered = True, True
        for relation, (source, _, target) in enumerate(book.canonical_etypes):
            edges = slice(offsets[relation], offsets[relation + 1])
            for ends, ntype in ((src[edges], source), (dst[edges], target)):
                have_types &= _are_all(types, ends, ntypes.index(ntype))
            are_ordered &= bool((dst[edges][1:] >= dst[edges][:-1]).all())
        parts = structure.node_parts().to(torch.int16 if config.num_parts < 2**15 else torch.int32)
        owners = book.eid2partid(structure.outer)
        outer_src, outer_dst = src[num_inner:], dst[num_inner:]
        pairs = [(ntypes.index(s), ntypes.index(d)) for s, _, d in book.canonical_etypes]
        said = torch.tensor(pairs).view(-1, 2)[book.map_to_per_etype(structure.outer)[0]]
        for column, nodes in ((said[:, 0], outer_src), (said[:, 1], outer_dst)):
            have_types &= torch.equal(types.index_select(0, nodes).long(), column)
        are_own = _are_all(parts, dst[:num_inner], part)
        are_own &= torch.equal(parts.index_select(0, outer_dst).long(), owners)
        self._expect(part, have_types, "the ends of an edge have other types than its own")
        self._expect(part, are_own, "an edge is not owned by the part of its destination")
        are_ordered |= not config.edges_by_destination
        self._expect(part, are_ordered, "inner edges are not ordered by type and destination")
        for some in src[:num_inner].split(_BLOCK):
            self.entering[:, part] += _counted(parts.index_select(0, some), config.num_parts)
        self.outer[part] = _counted(owners, config.num_parts)
        from_here = owners[outer_src < structure.num_inner_nodes]
        self.leaving[part] = _counted(from_here, config.num_parts)

    def _check_sizes(self, structure: PartStructure) -> None:
        if self.config.stats is None:
            return
        part = structure.book.partid
        said = self.config.stats.parts[part]
        for what, number, actual in (
            ("inner nodes", said.inner_nodes, structure.num_inner_nodes),
            ("halo nodes", said.halo_nodes, len(structure.halo)),
            ("inner edges", said.inner_edges, structure.num_inner_edges),
            ("outer edges", said.outer_edges, len(structure.outer)),
            ("bytes", said.bytes, sum(f.bytes or 0 for f in self.config.files[part].values())),
        ):
            sentence = f"the statistics say {number} {what}, but it has {actual}"
            self._expect(part, number == actual, sentence)

    def copies(self) -> None:
        """Check that outer edges join the nodes that their owner says, and that none is missing."""
        num_parts = self.config.num_parts
        sizes = [part["num_edges"] for part in self.config.book(0).metadata()]
        starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        differing: set[int] = set()
        for first, last in _batches(sizes):
            if self.outer[:, first:last].any():
                differing |= self._differing(first, last, starts)
        for part in range(num_parts):
            same = part not in differing
            self._expect(part, same, "an outer edge joins other nodes than at its owner")
            if same and self.config.stats is not None and self.config.halo_hops:
                foreign = np.arange(num_parts) != part
                expected = self.entering[part][foreign]
                complete = np.array_equal(expected, self.leaving[part][foreign])
                self._expect(part, complete, "an edge that leaves it is missing")

    def _differing(self, first: int, last: int, starts: list[int]) -> set[int]:
        """The parts that have edges of parts from ``first`` to ``last`` and join others by them."""
        owners = {part: self._ends(part) for part in range(first, last)}
        parts = np.flatnonzero(self.outer[:, first:last].any(axis=1)).tolist()
        return {
            p for p in parts if not self._agrees(owners.get(p) or self._ends(p), owners, starts)
        }

    @staticmethod
    def _agrees(
        ends: _HomogenisedEnds, owners: dict[int, _HomogenisedEnds], starts: list[int]
    ) -> bool:
        """Whether the edges that a part has of some owners join what they do there."""
        for owner, of_owner in owners.items():
            ids = ends.outer
            places = ((ids >= starts[owner]) & (ids < starts[owner + 1])).nonzero().view(-1)
            theirs = of_owner.of(ids[places] - starts[owner])
            if not all(map(torch.equal, ends.of(places + ends.num_inner), theirs)):
                return False
        return True

    def _ends(self, part: int) -> _HomogenisedEnds:
        return _HomogenisedEnds(load_structure(self.config, part, checksum=False))

    def whole(self) -> None:
        """Check what only all parts together can show."""
        for (what, owner), (summed, count) in self.hashes.items():
            if (summed - sum(map(_sum_of_hashes, _ranges(count)))) % 2**64:
                sentence = f"the original ids of the {what} {owner} are not a permutation"
                self.problems.append(sentence)
        stats, cut = self.config.stats, int(self.entering.sum() - self.entering.trace())
        if stats is not None and stats.edge_cut != cut:
            self.problems.append(
                f"the statistics say that {stats.edge_cut} edges are cut, but {cut} are"
            )


class _HomogenisedEnds:
    """The ends of a part's edges, as homogenised ids."""

    def __init__(self, structure: PartStructure) -> None:
        self._src, self._dst = structure.adjacency.coo()
        self._ids = structure.node_ids()
        self.outer, self.num_inner = structure.outer, structure.num_inner_edges

    def of(self, edges: Tensor) -> tuple[Tensor, Tensor]:
        """Source and destination of some local edges."""
        src, dst = (ends.index_select(0, edges) for ends in (self._src, self._dst))
        return self._ids.index_select(0, src), self._ids.index_select(0, dst)


def _batches(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Consecutive parts that are looked at together: one large one, or several small ones."""
    first, total = 0, 0
    for part, size in enumerate(sizes):
        if part > first and total + size > _EDGES_AT_ONCE:
            yield first, part
            first, total = part, 0
        total += size
    yield first, len(sizes)


def _are_all(numbers: Tensor, index: Tensor, number: int) -> bool:
    """Whether ``numbers[index]`` is one number."""
    return all(bool((numbers.index_select(0, i) == number).all()) for i in index.split(_BLOCK))


def _counted(numbers: Tensor, count: int) -> npt.NDArray[np.int64]:
    return np.bincount(numbers.numpy(), minlength=count)


def _ranges(count: int) -> Iterator[npt.NDArray[np.int64]]:
    for start in range(0, count, _BLOCK):
        yield np.arange(start, min(start + _BLOCK, count))


def _sum_of_hashes(ids: npt.NDArray[np.int64]) -> int:
    """Sum of a hash of each id, so that other ids have another sum; the finalizer of SplitMix64.

    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    mixed = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))
