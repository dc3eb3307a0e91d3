# SPDX-License-Identifier: Apache-2.0
"""A partition made while the edges pass by: O(nodes) in memory, edges in files only.

All partitions are made so. Files of a small graph are never read from the disk: they are in memory
as pages of files.

::

    edges of the source, a batch at a time
      | adjacency   both ends of each edge, sorted by node        (multilevel only)
      | assign      the part of each node, see `_multilevel`      (or as `assign` has it)
      | number      new ids: by part, type, readers, cluster
      v
    edges again, under new ids
      | edges-R     those of relation R, sorted by destination, with their original ids
      | outer       those that leave a part, by the part of their source
      v part-P      the three files of part P, column by column

Each line is a stage of the `Journal`. Files are read and written in sequence; at random places are
read only arrays with a number per node, from memory: at most 20 bytes a node in all, besides what
is asked to be balanced. What is written does not depend on threads, memory or batches.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._base.files import sync_file
from .._base.typing import CanonicalEType
from ..errors import MetisError
from ._book import RangePartitionBook
from ._edge_files import (
    BATCH_EDGES,
    Bytes,
    EdgeBlock,
    EdgeCounts,
    EdgeSorter,
    NodeArray,
    SortedEdges,
    SpillFile,
    combined,
    kernels,
    map_ahead,
    node_dtype,
    read_ahead,
)
from ._graph_source import IdArray
from ._metis import UndirectedGraph
from ._multilevel import (
    DEFAULT_HALO_TOLERANCE,
    Level,
    NodeWeights,
    PartNumbers,
    as_table,
    inverse,
    multilevel_partition,
)
from ._node_order import GRAY_PLACES, NUM_DIGITS
from ._stats import Balance, PartSizes, measure_balance
from ._writer import Journal, MakeStage, PartitionWriter
from .assign import Constraint, distinct_constraints, fill_empty_parts, repaired
from .checked_files import (
    FileRecord,
    RowSource,
    StreamedColumn,
    etype_key,
    save_array,
    write_tensors,
)
from .structure import StructurePieces, id_dtype, stored_dtype

if TYPE_CHECKING:
    from ._ranks import PartitionRanks

DEFAULT_MEMORY = 1 << 29
"""Bytes for edges in flight, in all threads together, besides what is kept for each node."""


class EdgeSource(Protocol):
    """A graph whose edges come a batch at a time."""

    ntypes: list[str]
    canonical_etypes: list[CanonicalEType]
    node_counts: list[int]
    edge_counts: list[int]
    src_type: list[int]
    dst_type: list[int]
    idtype: torch.dtype
    num_nodes: int
    num_edges: int
    offsets: list[int]

    def edge_batches(self, relation: int) -> Iterator[tuple[IdArray, IdArray]]:
        """(source, destination) of some edges, int32 or int64 per-type ids, in edge id order."""

    def identity(self) -> Mapping[str, Any]:
        """What identifies the edges: another graph has another one."""

    def node_feature_rows(self, type_id: int, ids: Tensor) -> Mapping[str, RowSource]:
        """Features of some nodes of a type."""

    def edge_feature_rows(
        self, relation: int, ids: Callable[[], Iterator[Tensor]], count: int
    ) -> Mapping[str, RowSource]:
        """Features of some edges of a relation, whose ids come piece by piece."""


@dataclass(frozen=True)
class Streaming:
    """What `stream_parts` is asked for; as the arguments of `partition_graph`, but for these.

    Args:
        given: uint16 ``[num_nodes]``, the part of each node, for each of all trainers; None to
            assign them here.
        order: All nodes, those that are to be near each other in sequence; None for the order that
            they have, or that the multilevel assignment finds.
        method: What to call the assignment.
        constraints: What is balanced; None where it is the number of nodes alone.
        memory: See `DEFAULT_MEMORY`.
        resumes: Whether stages are kept for the next run if this one does not come to its end.
        coarse: What a level must be smaller than to be given to METIS: nodes, and ends of edges.
    """

    num_parts: int
    num_hops: int
    trainers_per_part: int
    tolerance: float
    seed: int
    reorder: bool
    memory: int
    num_threads: int
    method: str = "multilevel"
    given: PartNumbers | None = None
    order: NodeArray | None = None
    resumes: bool = True
    constraints: Sequence[Constraint] | None = None
    halo_tolerance: float | None = DEFAULT_HALO_TOLERANCE
    coarse: tuple[int, int] | None = None


@dataclass(frozen=True)
class StreamedPartition:
    """What was written, but for the JSON.

    Args:
        parts: Results of the stages that write parts.
        old_node_ids: Per type, the original id of each new one; None where it is not asked for.
        old_edge_ids: The same per relation.
    """

    book: RangePartitionBook
    parts: list[dict[str, Any]]
    sizes: tuple[PartSizes, ...]
    balances: tuple[Balance, ...]
    old_node_ids: list[Tensor] | None
    old_edge_ids: list[Tensor] | None


def stream_parts(
    source: EdgeSource,
    writer: PartitionWriter,
    asked: Streaming,
    *,
    progress: Callable[[str], None] = lambda _: None,
    returns_mapping: bool = False,
    ranks: PartitionRanks | None = None,
) -> StreamedPartition:
    """Write the files of all parts with ``writer``, which is open; the caller commits.

    What is finished when this is interrupted, or a disk is full, is taken up by the next call for
    the same work.

    Raises:
        RuntimeError: Parts are to be found here, and there are no compiled kernels.
        MetisError: METIS is missing or failed.
        OSError: A file cannot be written.
    """
    journal = (
        Journal(writer.work_folder, _work_of(source, asked))
        if asked.resumes
        else Journal(writer.stages_folder, None)
    )
    if ranks is not None:
        ranks.lead(journal, source, asked)
    try:
        made = Stages(source, journal, asked, progress).finish(returns_mapping)
    except (ValueError, TypeError, IndexError, MetisError):
        journal.remove()  # the same work would fail again
        raise
    sizes = []
    for part, results in enumerate(made.parts):
        folder = journal.path(f"part-{part}")
        num_bytes = 0
        for kind, record in results["files"].items():
            writer.adopt_file(part, kind, folder / kind, FileRecord(**record))
            num_bytes += record["bytes"]
        sizes.append(PartSizes(**results["sizes"], bytes=num_bytes))
    return replace(made, sizes=tuple(sizes))


class Stages:
    """The stages, in their order."""

    def __init__(
        self,
        source: EdgeSource,
        journal: Journal,
        asked: Streaming,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.source, self.journal, self.asked, self.progress = source, journal, asked, progress
        self.dtype = node_dtype(source.num_nodes)
        if journal.resumes:
            progress("going on where an earlier run of the same work ended")

    def finish(self, returns_mapping: bool) -> StreamedPartition:
        source, asked = self.source, self.asked
        total = asked.num_parts * asked.trainers_per_part
        is_streamed = asked.given is None and total > 1 and self.journal.leads
        if is_streamed:
            self.progress("adjacency: sorting both ends of each edge")
            self.journal.run("adjacency", self._make_adjacency)
        if is_streamed:
            self.progress("assign: dividing nodes")
        self.journal.run("assign", self._make_assignment)
        self.progress("number: new ids of nodes")
        numbered = self.journal.run("number", self._make_numbers)
        if is_streamed and (self.journal.path("adjacency")).exists():
            self.journal.drop("adjacency")
        node_sizes: list[list[int]] = numbered["node_sizes"]
        sorting: dict[str, MakeStage] = {
            f"edges-{i}": partial(self._sort, i) for i in range(len(source.canonical_etypes))
        }
        self.journal.run_each(sorting, num_threads=1)
        edges = [
            SortedEdges(self.journal.path(name), **self.journal.run(name, make))
            for name, make in sorting.items()
        ]
        view = _PartsView(source, edges, node_sizes)
        self.progress("outer: edges that leave their part")
        self.journal.run("outer", lambda folder: _write_outer(folder, view, asked))
        parts = self._write_parts(view)
        balances = tuple(
            Balance(item["name"], tuple(item["loads"])) for item in numbered["balances"]
        )
        old_nodes, old_edges = None, None
        if returns_mapping:
            old_nodes = self._old_node_ids(view)
            old_edges = [
                torch.from_numpy(item.values(0, item.num_edges).astype(np.int64)) for item in edges
            ]
        return StreamedPartition(view.book, parts, (), balances, old_nodes, old_edges)

    def _make_adjacency(self, folder: Path) -> dict[str, Any]:
        """All edges of all relations from both of their ends, sorted by node, without loops."""
        source = self.source
        sorter = EdgeSorter(
            folder,
            source.num_nodes,
            2 * source.num_edges,
            value_dtype=None,
            memory=self.asked.memory,
            num_threads=self.asked.num_threads,
        )
        asymmetry = 0
        for is_reverse in (False, True):
            for relation in range(len(source.canonical_etypes)):
                ends = (source.dst_type[relation], source.src_type[relation])
                row_type, col_type = reversed(ends) if is_reverse else ends
                for src, dst in _batches(source, relation, self.asked.num_threads):
                    rows, cols = (src, dst) if is_reverse else (dst, src)
                    first_row, first_col = source.offsets[row_type], source.offsets[col_type]
                    if not is_reverse:
                        _, difference = kernels().hash_edges(
                            rows, cols, first_row, first_col, 0, self.asked.num_threads
                        )
                        asymmetry += difference
                    sorter.add(
                        rows,
                        cols,
                        first_row=first_row,
                        num_ids=source.node_counts[row_type],
                        first_col=first_col,
                        num_col_ids=source.node_counts[col_type],
                        drops_loops=True,
                    )
            if asymmetry % 2**64 == 0:  # every edge is there from both ends already
                break
            if not is_reverse:
                sorter.split()
        return _without_folder(sorter.finish())

    def _make_assignment(self, folder: Path) -> dict[str, Any]:
        """The part of each node, counting trainers, and the place of its cluster."""
        source, asked = self.source, self.asked
        total = asked.num_parts * asked.trainers_per_part
        num_clusters = 0
        if asked.given is not None:
            parts = asked.given
        elif total == 1:
            parts = np.zeros(source.num_nodes, dtype=np.uint16)
        elif source.num_nodes <= total:
            parts = (np.arange(source.num_nodes) % total).astype(np.uint16)
        else:
            chosen = None if asked.constraints is None else distinct_constraints(asked.constraints)
            weights = None if chosen is None else as_table(chosen)
            content = self.journal.run("adjacency", self._make_adjacency)
            edges = SortedEdges(self.journal.path("adjacency"), **content)
            coarse = {}
            if asked.coarse is not None:
                coarse = {"coarse_nodes": asked.coarse[0], "coarse_edges": asked.coarse[1]}
            (inside := folder / "levels").mkdir()
            divided = multilevel_partition(
                Level(edges, weights),
                total,
                chosen if weights is not None else None,
                folder=inside,
                memory=asked.memory,
                num_threads=asked.num_threads,
                tolerance=asked.tolerance,
                halo_tolerance=asked.halo_tolerance,
                seed=asked.seed,
                progress=self.progress,
                **coarse,
            )
            shutil.rmtree(inside)
            parts, num_clusters = divided.parts, divided.num_clusters
            parts = _within_limits(parts, weights, chosen, total, asked.tolerance)
            save_array(folder / "places.npy", divided.places)
        save_array(folder / "parts.npy", parts)
        return {"num_clusters": num_clusters}

    def _assigned(self) -> PartNumbers:
        """The part of each node, counting trainers."""
        assigned: PartNumbers = np.load(self.journal.path("assign") / "parts.npy")
        return assigned

    def _trainers(self) -> PartNumbers | None:
        """The trainer of each node, where a part has several."""
        return None if self.asked.trainers_per_part == 1 else self._assigned()

    def _make_numbers(self, folder: Path) -> dict[str, Any]:
        """The old id of each new one, and the new of each old."""
        source, asked = self.source, self.asked
        parts = self._assigned()
        if asked.trainers_per_part > 1:
            parts //= np.uint16(asked.trainers_per_part)
        num_types = len(source.ntypes)
        order = None if asked.order is None else asked.order.astype(self.dtype)

        def sort(keys: NodeArray, num_keys: int) -> NodeArray:
            ordered = np.empty(source.num_nodes, dtype=self.dtype)
            kernels().order_by_key(keys, num_keys, order, ordered, asked.num_threads)
            return ordered

        assigned = self.journal.path("assign")
        if asked.reorder and (assigned / "places.npy").exists():
            places = np.load(assigned / "places.npy")
            results = self.journal.run("assign", self._make_assignment)
            order = sort(places, results["num_clusters"])
            del places
        if asked.reorder and asked.num_parts > 1:
            order = sort(places_by_readers(source, parts, asked.num_parts, asked.num_threads), 256)
        keys: NodeArray = parts
        if num_types > 1:
            keys = parts.astype(np.uint32) * np.uint32(num_types)
            for type_id in range(num_types):
                keys[source.offsets[type_id] : source.offsets[type_id + 1]] += np.uint32(type_id)
        sizes = np.bincount(keys, minlength=asked.num_parts * num_types)
        order = sort(keys, asked.num_parts * num_types)
        with ThreadPoolExecutor(max_workers=1) as pool:
            saving = pool.submit(save_array, folder / "old_ids.npy", order)
            save_array(folder / "new_ids.npy", inverse(order, asked.num_threads))
            saving.result()
        if asked.constraints is None:
            counts = np.bincount(parts, minlength=asked.num_parts)
            balances: tuple[Balance, ...] = (Balance("nodes", tuple(counts.tolist())),)
        else:
            balances = measure_balance(asked.constraints, parts, asked.num_parts)
        return {
            "node_sizes": sizes.reshape(asked.num_parts, num_types).tolist(),
            "balances": [{"name": item.name, "loads": list(item.loads)} for item in balances],
        }

    def _sort(self, relation: int, folder: Path) -> dict[str, Any]:
        """The edges of a relation under new ids, by destination."""
        source = self.source
        self.progress(f"edges: sorting those of {etype_key(source.canonical_etypes[relation])}")
        new_ids = np.load(self.journal.path("number") / "new_ids.npy")
        sorter = EdgeSorter(
            folder,
            source.num_nodes,
            source.edge_counts[relation],
            value_dtype=np.uint32 if source.edge_counts[relation] < 2**32 else np.int64,
            memory=self.asked.memory,
            num_threads=self.asked.num_threads,
        )
        src_type, dst_type = source.src_type[relation], source.dst_type[relation]
        done = 0
        for src, dst in _batches(source, relation, self.asked.num_threads):
            sorter.add(
                dst,
                src,
                numbers=new_ids,
                first_row=source.offsets[dst_type],
                num_ids=source.node_counts[dst_type],
                first_col=source.offsets[src_type],
                num_col_ids=source.node_counts[src_type],
                first_value=done,
            )
            done += len(dst)
        return _without_folder(sorter.finish())

    def _write_parts(self, view: _PartsView) -> list[dict[str, Any]]:
        """Write the files of all parts, several at a time."""
        num_parts = self.asked.num_parts
        outer = SpillFile.reopen(self.journal.path("outer") / "edges", view.outer_dtype.itemsize)

        # A file gets to the disk while the next ones are written, those of other parts among them.
        num_threads = self.asked.num_threads
        pool = ThreadPoolExecutor(max_workers=num_threads)
        working = threading.Semaphore(num_threads)

        def write(part: int, folder: Path) -> dict[str, Any]:
            syncing: list[Future[None]] = []
            with working:
                results = self._write_part(
                    *(folder, view, part, outer),
                    written=lambda path: syncing.append(pool.submit(sync_file, path)),
                )
            for synced in syncing:
                synced.result()
            self.progress(f"parts: part {part} written ({num_parts} in all)")
            return results

        self.progress("parts: writing files")
        stages = {f"part-{part}": partial(write, part) for part in range(num_parts)}
        with pool:
            written = self.journal.run_each(stages, 2 * num_threads if num_threads > 1 else 1)
        outer.close()
        return written

    def _write_part(
        self,
        folder: Path,
        view: _PartsView,
        part: int,
        outer: SpillFile,
        *,
        written: Callable[[Path], object],
    ) -> dict[str, Any]:
        """Write the files of a part; ``written`` is called with each."""
        structure = _LocalPieces(view, part, outer)
        files = {
            "part_graph": structure.pieces().columns(),
            "node_feats": self._node_columns(view, part),
            "edge_feats": self._edge_columns(view, part),
        }
        records = {}
        for kind in files:
            records[kind] = asdict(write_tensors(folder / kind, files[kind], syncs=False))
            written(folder / kind)
        return {"files": records, "sizes": structure.sizes()}

    def _node_columns(self, view: _PartsView, part: int) -> dict[str, Tensor | RowSource]:
        source = self.source
        old_ids = np.load(self.journal.path("number") / "old_ids.npy", mmap_mode="r")
        trainers = self._trainers()
        columns: dict[str, Tensor | RowSource] = {}
        first, _ = view.node_span(part)
        for type_id, ntype in enumerate(source.ntypes):
            last = first + view.node_sizes[part][type_id]
            members = np.array(old_ids[first:last]).astype(np.int64)
            ids = torch.from_numpy(members - source.offsets[type_id])
            for name, rows in source.node_feature_rows(type_id, ids).items():
                columns[f"{ntype}/{name}"] = rows
            columns[f"{ntype}/orig_id"] = ids.to(stored_dtype(source.node_counts[type_id]))
            if trainers is not None:
                columns[f"{ntype}/trainer_id"] = torch.from_numpy(
                    trainers[members].astype(np.int64)
                )
            first = last
        return columns

    def _edge_columns(self, view: _PartsView, part: int) -> dict[str, Tensor | RowSource]:
        source = self.source
        trainers = self._trainers()
        columns: dict[str, Tensor | RowSource] = {}
        for relation, etype in enumerate(source.canonical_etypes):
            key = etype_key(etype)
            start, count = view.edge_span(part, relation)
            edges = view.edges[relation]

            def ids(
                edges: SortedEdges = edges, start: int = start, count: int = count
            ) -> Iterator[Tensor]:
                for first in range(start, start + count, BATCH_EDGES):
                    some = edges.values(first, min(BATCH_EDGES, start + count - first))
                    yield torch.from_numpy(some.astype(np.int64))

            for name, rows in source.edge_feature_rows(relation, ids, count).items():
                columns[f"{key}/{name}"] = rows
            dtype = stored_dtype(source.edge_counts[relation])
            stored = partial(_converted, ids, dtype)
            columns[f"{key}/orig_id"] = StreamedColumn(dtype, count, stored)
            if trainers is not None:
                columns[f"{key}/trainer_id"] = self._edge_trainers(view, part, relation, trainers)
        return columns

    def _edge_trainers(
        self, view: _PartsView, part: int, relation: int, trainers: PartNumbers
    ) -> RowSource:
        old_ids = np.load(self.journal.path("number") / "old_ids.npy", mmap_mode="r")

        def numbers() -> Iterator[Tensor]:
            for block in view.inner_blocks(part, relation, with_values=False):
                rows = slice(block.first_row, block.first_row + len(block.degrees))
                of_rows = trainers[np.array(old_ids[rows])].astype(np.int64)
                yield torch.from_numpy(np.repeat(of_rows, block.degrees))

        return StreamedColumn(torch.int64, view.edge_span(part, relation)[1], numbers)

    def _old_node_ids(self, view: _PartsView) -> list[Tensor]:
        old_ids = np.load(self.journal.path("number") / "old_ids.npy").astype(np.int64)
        blocks: list[list[IdArray]] = [[] for _ in self.source.ntypes]
        first = 0
        for sizes in view.node_sizes:
            for type_id, size in enumerate(sizes):
                blocks[type_id].append(old_ids[first : first + size] - self.source.offsets[type_id])
                first += size
        return [torch.from_numpy(np.concatenate(some)) for some in blocks]


def places_by_readers(
    source: EdgeSource, parts: PartNumbers, num_parts: int, num_threads: int
) -> npt.NDArray[np.uint8]:
    """What to sort the nodes of a part by, see the note in `_node_order`.

    An edge is read by the part of its destination.

    Args:
        parts: ``[num_nodes]``, in homogenised order.

    Returns:
        ``[num_nodes]``; 0 for nodes that no other part reads.
    """
    pairs = np.zeros((num_parts, num_parts), dtype=np.int64)
    for src, dst, ranges in _edges_with_ranges(source, num_threads):
        kernels().count_cut(src, dst, parts, *ranges, pairs, num_threads)
    # Digit [owner, reader]: that of the reader that reads most is 0.
    by_number = np.argsort(-pairs, axis=1, kind="stable")
    digits = np.minimum(np.argsort(by_number, axis=1), NUM_DIGITS).astype(np.uint8)
    masks = np.zeros(source.num_nodes, dtype=np.uint8)
    for src, dst, ranges in _edges_with_ranges(source, num_threads):
        kernels().mark_readers(src, dst, parts, *ranges, digits, masks, num_threads)
    return GRAY_PLACES[masks]


def _batches(
    source: EdgeSource, relation: int, num_threads: int
) -> Iterator[tuple[IdArray, IdArray]]:
    """The edges of a relation; with several threads, some are read while others are used."""
    is_worth_it = num_threads > 1 and source.edge_counts[relation] > BATCH_EDGES
    return read_ahead(source.edge_batches(relation), is_worth_it=is_worth_it)


def _edges_with_ranges(
    source: EdgeSource, num_threads: int
) -> Iterator[tuple[IdArray, IdArray, tuple[int, int, int, int]]]:
    """Ends of edges, and the first and the number of the nodes of their types."""
    for relation in range(len(source.canonical_etypes)):
        src_type, dst_type = source.src_type[relation], source.dst_type[relation]
        ranges = (
            *(source.offsets[src_type], source.node_counts[src_type]),
            *(source.offsets[dst_type], source.node_counts[dst_type]),
        )
        for src, dst in _batches(source, relation, num_threads):
            yield src, dst, ranges


class _PartsView:
    """Where the nodes and edges of each part lie, under their new ids."""

    def __init__(
        self, source: EdgeSource, edges: Sequence[SortedEdges], node_sizes: list[list[int]]
    ) -> None:
        self.source, self.edges, self.node_sizes = source, edges, node_sizes
        self.num_parts = len(node_sizes)
        self.dtype = node_dtype(source.num_nodes)
        self.outer_dtype = np.dtype([("src", self.dtype), ("dst", self.dtype), ("edge", "<i8")])
        flat = np.array(node_sizes, dtype=np.int64).reshape(self.num_parts, -1)
        self._block_starts = (np.cumsum(flat) - flat.reshape(-1)).reshape(flat.shape)
        self.ends = np.cumsum(flat.sum(axis=1))
        starts = np.zeros((self.num_parts, len(edges)), dtype=np.int64)
        sizes = np.zeros_like(starts)
        for part, relation in np.ndindex(sizes.shape):
            first, last = self.rows(part, relation)
            starts[part, relation] = edges[relation].first_edge(first)
            sizes[part, relation] = edges[relation].first_edge(last) - starts[part, relation]
        self._edge_spans = np.stack([starts, sizes])
        self.edge_sizes: list[list[int]] = sizes.tolist()
        self.book = RangePartitionBook.of_sizes(
            0, source.ntypes, source.canonical_etypes, node_sizes, self.edge_sizes
        )
        #: Homogenised id of the first edge of each relation in each part.
        self.edge_starts: IdArray = (np.cumsum(sizes) - sizes.reshape(-1)).reshape(sizes.shape)

    def node_span(self, part: int) -> tuple[int, int]:
        """Homogenised ids of the nodes of a part: the first, and that behind the last."""
        end = int(self.ends[part])
        return end - sum(self.node_sizes[part]), end

    def rows(self, part: int, relation: int) -> tuple[int, int]:
        """The same of those nodes that edges of a relation lead to."""
        type_id = self.source.dst_type[relation]
        start = int(self._block_starts[part, type_id])
        return start, start + self.node_sizes[part][type_id]

    def edge_span(self, part: int, relation: int) -> tuple[int, int]:
        """The first of a part's edges among the sorted ones of a relation, and how many."""
        start, count = self._edge_spans[:, part, relation].tolist()
        return start, count

    def inner_blocks(
        self, part: int, relation: int, *, with_values: bool = False
    ) -> Iterator[EdgeBlock]:
        """The edges of a relation that a part owns."""
        first, last = self.rows(part, relation)
        for block, _ in self.edges[relation].blocks(first, last, with_values=with_values):
            yield block

    def first_edge_id(self, part: int, relation: int, block: EdgeBlock) -> int:
        """Homogenised id of the first edge of a block."""
        offset = block.first_edge - self.edge_span(part, relation)[0]
        return int(self.edge_starts[part, relation]) + offset


def _write_outer(folder: Path, view: _PartsView, asked: Streaming) -> dict[str, Any]:
    """The edges that a part keeps besides its own, by part, ascending by their ids."""
    spill = SpillFile(folder / "edges", view.num_parts, view.outer_dtype.itemsize)
    if asked.num_hops == 1:
        found = _cut_edges(view, asked.num_threads)
    else:
        found = _edges_within(view, asked.num_hops)
    for records, counts in combined(found, view.outer_dtype.itemsize):
        spill.append(records, counts)
    spill.save()
    return {}


def _cut_edges(view: _PartsView, num_threads: int) -> Iterator[tuple[Bytes, EdgeCounts]]:
    """Records of edges that leave a part, by the part of their source; and how many of each."""

    def find(item: tuple[int, int, EdgeBlock]) -> tuple[Bytes, EdgeCounts]:
        part, first_edge, block = item
        records = np.empty(len(block.cols) * view.outer_dtype.itemsize, dtype=np.uint8)
        counts = np.empty(view.num_parts, dtype=np.int64)
        kernels().find_cut_edges(
            block.degrees, block.cols, block.first_row, first_edge, view.ends, part, records, counts
        )
        return records, counts

    blocks = (
        (part, view.first_edge_id(part, relation, block), block)
        for part, relation in np.ndindex(view.num_parts, len(view.edges))
        for block in view.inner_blocks(part, relation)
    )
    return map_ahead(find, blocks, num_threads)


def _edges_within(view: _PartsView, num_hops: int) -> Iterator[tuple[Bytes, EdgeCounts]]:
    """Likewise of edges within ``num_hops`` of a part: none for 0."""
    for part in range(view.num_parts if num_hops > 1 else 0):
        for records in _reached_edges(view, part, num_hops):
            counts = np.zeros(view.num_parts, dtype=np.int64)
            counts[part] = len(records)
            yield records.view(np.uint8), counts


def _reached_edges(view: _PartsView, part: int, num_hops: int) -> Iterator[npt.NDArray[Any]]:
    """Edges within ``num_hops``, from 2 on, of a part and not its own, ascending by their ids."""
    first, last = view.node_span(part)
    reached = np.zeros(-(-view.source.num_nodes // 64), dtype=np.uint64)
    for relation in range(len(view.edges)):
        for block in view.inner_blocks(part, relation):
            kernels().mark_outside(block.cols, first, last, reached)

    def is_reached(ids: NodeArray, bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        words = bits[ids >> np.uint64(6)] if ids.dtype != np.int64 else bits[ids >> 6]
        return (words >> (ids.astype(np.uint64) & np.uint64(63))) & np.uint64(1) != 0

    for _ in range(num_hops - 2):
        before = reached.copy()
        for other, relation in np.ndindex(view.num_parts, len(view.edges)):
            for block in view.inner_blocks(other, relation):
                rows = np.arange(block.first_row, block.first_row + len(block.degrees))
                is_in = np.repeat(is_reached(rows, before), block.degrees)
                kernels().mark_outside(block.cols[is_in], first, last, reached)
    for other, relation in np.ndindex(view.num_parts, len(view.edges)):
        if other == part:
            continue
        for block in view.inner_blocks(other, relation):
            rows = np.arange(block.first_row, block.first_row + len(block.degrees))
            is_kept = np.repeat(is_reached(rows, reached), block.degrees)
            is_kept |= (block.cols >= first) & (block.cols < last)
            records = np.empty(int(is_kept.sum()), dtype=view.outer_dtype)
            records["src"] = block.cols[is_kept]
            records["dst"] = np.repeat(rows, block.degrees)[is_kept].astype(view.dtype)
            start = view.first_edge_id(other, relation, block)
            records["edge"] = np.flatnonzero(is_kept) + start
            yield records


class _LocalPieces:
    """The local graph of a part, column by column.

    *Inner* nodes are those that the part owns, *inner* edges all their in-edges. Around them lie
    *halo* nodes, which other parts own, and *outer* edges: with ``num_hops`` from 1 up those from
    an inner node to a foreign one, and from 2 up the in-edges of the halo nodes so far, ``num_hops
    - 1`` times. Local ids: inner nodes in the order of their new ids, then halo nodes in the order
    of theirs; edges likewise.
    """

    def __init__(self, view: _PartsView, part: int, outer: SpillFile) -> None:
        self._view, self._part, self._outer = view, part, outer
        self._first, self._last = view.node_span(part)
        num_words = max(-(-view.source.num_nodes // 64), 1)
        self._bits = np.zeros(num_words, dtype=np.uint64)
        self._cut_edges = 0
        for relation in range(len(view.edges)):
            for block in view.inner_blocks(part, relation):
                self._cut_edges += kernels().mark_outside(
                    block.cols, self._first, self._last, self._bits
                )
        self._num_outer = outer.count(part)
        for records in self._outer_records():
            for name in ("src", "dst"):
                ends = records[name].copy()
                kernels().mark_outside(ends, self._first, self._last, self._bits)
        self._ranks = np.empty(num_words, dtype=np.int64)
        self._num_halo: int = kernels().rank_words(self._bits, self._ranks)
        self._num_inner = self._last - self._first
        self._dtype = id_dtype(self._num_inner + self._num_halo)
        self._num_inner_edges = sum(view.edge_sizes[part])

    def sizes(self) -> dict[str, int]:
        """As `PartSizes`, but for the bytes."""
        return {
            "inner_nodes": self._num_inner,
            "halo_nodes": self._num_halo,
            "inner_edges": self._num_inner_edges,
            "outer_edges": self._num_outer,
            "cut_edges": self._cut_edges,
        }

    def pieces(self) -> StructurePieces:
        """What is written of it."""
        return StructurePieces(
            num_inner_nodes=self._num_inner,
            num_halo_nodes=self._num_halo,
            num_inner_edges=self._num_inner_edges,
            num_outer_edges=self._num_outer,
            by_destination=len(self._view.edges) == 1,
            src=lambda: itertools.chain(self._inner_src(), self._outer_ends("src")),
            dst=lambda: itertools.chain(self._inner_dst(), self._outer_ends("dst")),
            halo=self._halo,
            outer=self._outer_ids,
        )

    def _halo(self) -> Iterator[Tensor]:
        """Ids of the nodes of others, ascending."""
        words = BATCH_EDGES // 64
        ids = np.empty(BATCH_EDGES, dtype=np.int64)
        for first in range(0, len(self._bits), words):
            count = kernels().list_marked(
                self._bits, first, min(first + words, len(self._bits)), ids
            )
            yield torch.from_numpy(ids[:count].copy())

    def _outer_records(self) -> Iterator[npt.NDArray[Any]]:
        for records in self._outer.segments(self._part, BATCH_EDGES):
            yield records.view(self._view.outer_dtype)

    def _outer_ids(self) -> Iterator[Tensor]:
        for records in self._outer_records():
            yield torch.from_numpy(records["edge"].copy())

    def _outer_ends(self, name: str) -> Iterator[Tensor]:
        for records in self._outer_records():
            yield self._local_ids(records[name].copy())

    def _inner_src(self) -> Iterator[Tensor]:
        for relation in range(len(self._view.edges)):
            for block in self._view.inner_blocks(self._part, relation):
                yield self._local_ids(block.cols)

    def _inner_dst(self) -> Iterator[Tensor]:
        numbers = np.int32 if self._dtype == torch.int32 else np.int64
        for relation in range(len(self._view.edges)):
            for block in self._view.inner_blocks(self._part, relation):
                start = block.first_row - self._first
                rows = np.arange(start, start + len(block.degrees), dtype=numbers)
                yield torch.from_numpy(np.repeat(rows, block.degrees))

    def _local_ids(self, ids: NodeArray) -> Tensor:
        made = torch.empty(len(ids), dtype=self._dtype)
        kernels().find_local_ids(ids, self._first, self._last, self._bits, self._ranks, made)
        return made


def _without_folder(edges: SortedEdges) -> dict[str, Any]:
    """What JSON can hold of sorted edges, which are in the folder of their stage."""
    content = dict(vars(edges))
    del content["folder"]
    return content


def _converted(pieces: Callable[[], Iterator[Tensor]], dtype: torch.dtype) -> Iterator[Tensor]:
    return (piece.to(dtype) for piece in pieces())


def _within_limits(
    parts: PartNumbers,
    weights: NodeWeights | None,
    constraints: Sequence[Constraint] | None,
    num_parts: int,
    tolerance: float,
) -> PartNumbers:
    """``parts``, of which none is empty or too heavy where that can be; or a warning."""
    num_nodes = len(parts)
    counts = np.bincount(parts, minlength=num_parts)
    is_met = bool((counts > 0).all())
    if weights is None or constraints is None:
        ones = num_nodes / num_parts
        is_met &= counts.max() <= max(tolerance * ones, ones + 1)
    else:
        for constraint in constraints:
            loads = np.bincount(parts, weights=constraint.weights, minlength=num_parts)
            is_met &= loads.max() <= constraint.limit(num_parts, tolerance)
    if is_met:
        return parts
    edgeless = UndirectedGraph(np.zeros(num_nodes + 1, np.int64), np.zeros(0, np.int64))
    if constraints is None:
        constraints = [Constraint.of_nodes(num_nodes)]
    filled = fill_empty_parts(edgeless, parts.astype(np.int64), num_parts)
    return repaired(edgeless, filled, constraints, num_parts, tolerance).astype(np.uint16)


def _work_of(source: EdgeSource, asked: Streaming) -> dict[str, Any]:
    """What identifies a run, for its journal."""
    digest = hashlib.blake2b(digest_size=16)
    for constraint in asked.constraints or ():
        digest.update(constraint.name.encode())
        digest.update(np.ascontiguousarray(constraint.weights).data)
    if asked.given is not None:
        digest.update(np.ascontiguousarray(asked.given).data)
    return {
        "version": 3,
        "graph": dict(source.identity()),
        "nodes": dict(zip(source.ntypes, source.node_counts, strict=True)),
        "edges": [
            [list(etype), count]
            for etype, count in zip(source.canonical_etypes, source.edge_counts, strict=True)
        ],
        "idtype": str(source.idtype),
        "arrays": digest.hexdigest(),
        "num_parts": asked.num_parts,
        "num_hops": asked.num_hops,
        "method": asked.method,
        "trainers": asked.trainers_per_part,
        "tolerance": asked.tolerance,
        "halo_tolerance": asked.halo_tolerance,
        "seed": asked.seed,
        "reorder": asked.reorder,
        "coarse": None if asked.coarse is None else list(asked.coarse),
    }
