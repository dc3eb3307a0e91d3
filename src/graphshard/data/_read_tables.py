# SPDX-License-Identifier: Apache-2.0
"""read_tables: from tables to a graph with features, labels and splits, and what became of rows.

Every table is read once, in batches. Ids become numbers at once and are not kept; the columns of
features, labels and splits are kept as Arrow has them until they are encoded, one after another.
Nothing is a Python object for each row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._base.typing import CanonicalEType
from ..graph import Graph
from ..graph.structure import check_type_name
from ..partition import edge_lists
from ..partition.format import etype_key
from ._array_graph import ArrayGraph, Arrays, EdgeEnds, EndArrays, edge_list
from ._columns import arrow_array, evident_separator, family_of, plain_type, vectors_of
from ._kept_columns import KeptColumns
from ._repeated_ids import RepeatedIds
from ._row_ids import IdColumn, Int64Array, RowIds, count_repeated, of_one_type, rows_at_once
from ._table_files import TableBatch, TableSource
from ._table_report import (
    BadRow,
    EdgeReport,
    FeatureReport,
    JoinReport,
    NodeReport,
    TableReport,
    shown_id,
)
from ._table_targets import TableTargets, name_of_table, spoken_type
from .encodings import ONE_HOT_LIMIT, EncodedCounts, Encoding, EncodingFit
from .tables import (
    BY_TYPE,
    ROW_NUMBER,
    ROWS_OF_SEPARATORS,
    EdgeTable,
    JoinedTable,
    NodeTable,
    Tables,
    label_columns,
    named_columns,
    split_columns,
    with_names_of,
)
from .task import TaskInfo, inverse_names

_ROWS_IN_ORDER = 1 << 17
_MOST_BLOCKS = 64
_MOST_AT_ONCE = 1 << 22  # edges in memory
_MOST_NAMES = 12  # of columns in a message
_MANY_COLUMNS = 100  # of whole numbers: they may be counts of words
Columns = dict[str, Any]
"""Names to pyarrow ``ChunkedArray``s of one length."""


@dataclass(frozen=True, kw_only=True)
class TablesGraph:
    """A graph that was read from tables.

    Args:
        content: With the features, labels and splits that `graphshard.data.tables` describes.
        ids: Node type to the ids of its nodes, by number: a pyarrow array.
        task: What there is to train for.
        report: What was read.
    """

    content: ArrayGraph
    ids: dict[str, Any]
    task: TaskInfo
    report: TableReport

    @cached_property
    def graph(self) -> Graph:
        """The graph, in memory."""
        return self.content.graph()


def read_tables(
    tables: Tables,
    *,
    name: str = "graph",
    encodings_from: TaskInfo | None = None,
    folder: Path | None = None,
) -> TablesGraph:
    """Read tables.

    Args:
        name: Of the graph, for the task.
        encodings_from: A task whose schema has the encodings, and the classes of labels, to use;
            None: they are made from these tables.
        folder: Where files go of what has a row for each node or edge; None: it is in memory.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A column is missing, a file is damaged, or cells cannot be what they must be.
    """
    return _Reading(tables, name, encodings_from, Arrays(folder)).read()


class _Reading:
    """What is known while tables are read."""

    def __init__(
        self, tables: Tables, name: str, encodings_from: TaskInfo | None, arrays: Arrays
    ) -> None:
        self.name, self.arrays = name, arrays
        #: Of each node type and relation that has a table, and of those that are joined to it.
        self.readers: dict[Any, list[TableSource]] = {}
        self.tables = self._with_readers(tables)
        self.given_task = encodings_from
        self.given = None if encodings_from is None else encodings_from.schema
        if encodings_from is not None and self.given is None:
            raise ValueError(
                f"the partition of {encodings_from.name} has no encodings, as it was not made from "
                "tables; take one that was"
            )
        self.report = TableReport()
        self.report.notes += self._other_types()
        self.ids: dict[str, RowIds] = {}
        self.kept = KeptColumns(parent=arrays.folder)
        self.columns: dict[Any, Columns] = {}
        #: Of each node type and relation that is read, its features by name.
        self.features: dict[Any, dict[str, _Feature]] = {}
        self.ends: dict[CanonicalEType, EndArrays] = {}

    def read(self) -> TablesGraph:
        try:
            return self._read()
        finally:
            self.kept.close()

    def _read(self) -> TablesGraph:
        tables = self.tables
        for ntype, table in tables.nodes.items():
            self.read_nodes(ntype, table)
        for etype in tables.edges:
            for ntype in (etype[0], etype[2]):
                if ntype not in self.ids:
                    self.ids[ntype] = RowIds(ntype)
                    self.report.nodes[ntype] = NodeReport(id_column=None)
        for etype, edge_table in tables.edges.items():
            self.read_edges(etype, edge_table)
        counts = {ntype: len(ids) for ntype, ids in self.ids.items()}
        graph = self._graph(counts)
        for ntype in tables.nodes:
            self.fill(ntype, counts[ntype])
        targets = TableTargets(
            tables=tables,
            name=self.name,
            given_task=self.given_task,
            columns=self.columns,
            ids=self.ids,
            kept=self.kept,
            report=self.report,
        )
        task, is_training = targets.fill(graph)
        del targets
        schema: dict[str, Any] = {"nodes": {}, "edges": {}, "label": None}
        if task.schema is not None:
            schema["label"] = task.schema["label"]
        arrow_ids = {ntype: self.ids.pop(ntype).arrow() for ntype in list(self.ids)}
        for ntype in graph.ntypes:
            node_report, node_table = self.report.nodes[ntype], tables.nodes.get(ntype)
            node_report.num_nodes = counts[ntype]
            encodings: list[Encoding] = []
            if node_table is not None:
                rows = is_training.get(ntype)
                given = self._given("nodes", ntype)
                of_nodes = graph.nodes[ntype]
                encodings = self.encode(ntype, node_table, given, rows, of_nodes, node_report)
            id_type = str(arrow_ids[ntype].type)
            schema["nodes"][ntype] = {
                "id": {"column": node_report.id_column, "type": id_type},
                "features": [encoding.as_json() for encoding in encodings],
            }
        for etype, edge_table in tables.edges.items():
            edge_report = self.report.edges[etype]
            rows = is_training.get(etype)
            given = self._given("edges", etype_key(etype))
            fields = graph.edges[etype]
            encodings = self.encode(etype, edge_table, given, rows, fields, edge_report)
            self.add_weight_and_time(etype, edge_table, fields)
            if edge_table.relation_column is not None:
                names = self.add_relation_numbers(etype, edge_table.relation_column, fields)
                task = replace(task, relation_names=names, num_relations=len(names))
            schema["edges"][etype_key(etype)] = {
                "source": edge_table.source,
                "target": edge_table.target,
                "features": [encoding.as_json() for encoding in encodings],
                "weight": edge_table.weight,
                "time": edge_table.time,
            }
        task = replace(task, schema=schema)
        return TablesGraph(content=graph, ids=arrow_ids, task=task, report=self.report)

    def _with_readers(self, tables: Tables) -> Tables:
        """Open all files; the tables, in which columns go by their names."""
        named: dict[Any, Any] = {}
        every: dict[Any, NodeTable | EdgeTable] = {**tables.nodes, **tables.edges}
        for owner, table in every.items():
            joined = table.join if isinstance(table, NodeTable) else ()
            readers = [_reader(table, tables.base)]
            readers += [_reader(other, tables.base, table) for other in joined]
            names = {name for reader in readers for name in reader.schema.names}

            def name_of(said: str, first: TableSource = readers[0], names: Any = names) -> str:
                return said if said in names else first.column(said)

            self.readers[owner] = readers
            named[owner] = with_names_of(table, name_of)
        return replace(
            tables,
            nodes={ntype: named[ntype] for ntype in tables.nodes},
            edges={etype: named[etype] for etype in tables.edges},
        )

    def _other_types(self) -> Iterator[str]:
        """What is said where the tables are of other types than those of the encodings."""
        if self.given is None:
            return
        edges = list(map(etype_key, self.tables.edges))
        ntypes = [name for etype in self.tables.edges for name in (etype[0], etype[2])]
        for what, here in (("nodes", [*self.tables.nodes, *ntypes]), ("edges", edges)):
            known = self.given[what]
            new = [name for name in dict.fromkeys(here) if name not in known]
            gone = [name for name in known if name not in here]
            if new or gone:
                yield (
                    f"{what} of the other partition are {', '.join(known)}: "
                    + " and ".join(
                        [f"{', '.join(new)} is new, without features"] * bool(new)
                        + [f"{', '.join(gone)} is missing here"] * bool(gone)
                    )
                    + "; a model of that partition needs the same names"
                )

    def _graph(self, counts: dict[str, int]) -> ArrayGraph:
        """The graph, without fields."""
        for etype in sorted(self.ends):
            for name, what in zip(etype, ("node type", "relation", "node type"), strict=True):
                check_type_name(name, f"the name of a {what}")
        return ArrayGraph(
            arrays=self.arrays,
            num_nodes=counts,
            ends=self.ends,
            nodes={ntype: {} for ntype in counts},
            edges={etype: {} for etype in self.ends},
        )

    def _given(self, owner: str, name: str) -> list[Encoding] | None:
        """The encodings of a type in another partition."""
        if self.given is None:
            return None
        of_type = self.given[owner].get(name)
        if of_type is None:
            return []
        return [Encoding.of_json(content) for content in of_type["features"]]

    # ------------------------------------------------------------------ nodes

    def read_nodes(self, ntype: str, table: NodeTable) -> None:
        reader, *joined = self.readers[ntype]
        is_numbered = table.id == ROW_NUMBER
        key = None if is_numbered else table.id
        keys = [] if key is None else [key]
        names, of_joined = self._names_of_joined(ntype, reader, table, joined)
        wanted = self._needed(ntype, table, reader, names, keys, _indices(reader, *joined))
        needed = [name for name in wanted if name in reader.schema.names]
        report = NodeReport(id_column=key)
        self.report.nodes[ntype] = report
        report.unused = _unused(names, wanted, key, indices=_indices(reader, *joined))
        ids = self.ids[ntype] = RowIds(ntype)
        chunks: dict[str, list[Any]] = {column: [] for column in needed}
        repeated = RepeatedIds(reader, needed, self.kept)
        asked = list(dict.fromkeys([*needed, *([] if key is None else [key])]))
        if not asked:  # the rows must be counted
            asked = list(reader.schema.names[:1])
        num_rows = reader.known_num_rows()
        for batch in reader.batches(asked, rows_at_once()):
            report.num_rows += len(batch.columns)
            kept = batch.columns
            if key is None:
                first = len(ids)
                numbers = np.arange(first, first + len(kept), dtype=np.int64)
                rows = ids.add(arrow_array(numbers), IdColumn(batch.file, False))
            else:
                column = IdColumn(f"{batch.file}, column {key!r}", reader.is_untyped)
                values = kept.column(key)
                places: Int64Array | None = None
                if values.null_count:
                    places = self._refuse_nulls(batch, {key: values}, report.refused, "a node id")
                    kept = kept.take(arrow_array(places))
                    values = kept.column(key)
                before = len(ids)
                if num_rows is not None and 0 < before == report.num_rows - len(batch.columns):
                    ids.expect(num_rows)  # as all rows so far have other ids
                rows = ids.add(values, column)
                is_first = _first_of_each(rows, before)
                if not is_first.all():
                    doubled = np.flatnonzero(~is_first)
                    report.num_duplicates += len(doubled)
                    repeated.add(batch, kept, rows, doubled, places)
                    kept = kept.filter(arrow_array(is_first))
            self._keep(reader, kept, chunks)
        self._note_malformed(reader, report.refused, is_numbered=is_numbered)
        self.columns[ntype] = {
            name: reader.whole_column(name, chunks.pop(name), self.kept) for name in needed
        }
        repeated.compare(self.columns[ntype], ids, report, self.report)
        for other, source in zip(table.join, joined, strict=True):
            columns = [name for name in wanted if of_joined.get(name) is source]
            self.columns[ntype] |= self.join(ntype, other, source, columns)
        self.columns[ntype] = {name: self.columns[ntype][name] for name in wanted}

    def _names_of_joined(
        self, ntype: str, reader: TableSource, table: NodeTable, joined: Sequence[TableSource]
    ) -> tuple[list[str], dict[str, TableSource]]:
        """All columns of a type of nodes, and the tables that those of other tables are in."""
        names = list(reader.schema.names)
        of_joined: dict[str, TableSource] = {}
        for other, source in zip(table.join, joined, strict=True):
            key = None if other.id == ROW_NUMBER else source.column(other.id)
            for name in source.schema.names:
                if name == key:
                    continue
                if name in names and name not in table.ignore:
                    raise ValueError(
                        f"{source.name}: column {name!r} must be in one table of {ntype} (it is in "
                        "another, too); rename it (columns names those of a file without a "
                        "header), or name it in ignore"
                    )
                if name not in names:
                    names.append(name)
                    of_joined[name] = source
        return names, of_joined

    def join(
        self, ntype: str, table: JoinedTable, reader: TableSource, needed: Sequence[str]
    ) -> Columns:
        """Columns of another table of nodes that are there, by their ids."""
        key = None if table.id == ROW_NUMBER else reader.column(table.id)
        report = JoinReport(name=reader.name, id_column=key or ROW_NUMBER)
        self.report.nodes[ntype].joined.append(report)
        ids = self.ids[ntype]
        # Rows are put away by blocks of nodes, of which then each by itself is put in order.
        size = max(_ROWS_IN_ORDER, -(-len(ids) // _MOST_BLOCKS))
        num_blocks = max(1, -(-len(ids) // size))
        place_of = np.full(len(ids), -1, np.int64)  # of the row of each node, in its block
        num_kept = np.zeros(num_blocks, np.int64)
        chunks: list[dict[str, list[Any]]] = [{n: [] for n in needed} for _ in range(num_blocks)]
        asked = list(dict.fromkeys([*needed, *([] if key is None else [key])]))
        for batch in reader.batches(asked or list(reader.schema.names[:1]), rows_at_once()):
            rows = batch.columns
            if key is None:
                first = report.num_rows
                values = arrow_array(np.arange(first, first + len(rows), dtype=np.int64))
            else:
                values = rows.column(key)
            report.num_rows += len(rows)
            if values.null_count:
                is_id = values.is_valid()
                report.num_without_node += values.null_count
                rows, values = rows.filter(is_id), values.filter(is_id)
            is_untyped = key is not None and reader.is_untyped
            column = IdColumn(f"{batch.file}, column {key or ROW_NUMBER!r}", is_untyped)
            numbers = ids.find(values, column)
            is_there = numbers >= 0
            report.num_without_node += int(np.count_nonzero(~is_there))
            _, first_rows = np.unique(numbers, return_index=True)
            is_first = np.zeros(len(numbers), bool)
            is_first[first_rows] = True
            is_new = is_there & is_first
            is_new[is_there] &= place_of[numbers[is_there]] < 0
            report.num_duplicates += int(np.count_nonzero(is_there & ~is_new))
            new_rows = np.flatnonzero(is_new)
            block = numbers[new_rows] // size
            by_block = np.argsort(block, kind="stable")
            new_rows, block = new_rows[by_block], block[by_block]
            ends = np.searchsorted(block, np.arange(num_blocks + 1))
            in_order = rows.select(needed).take(arrow_array(new_rows)) if needed else rows
            for number in np.unique(block).tolist():
                begin, end = int(ends[number]), int(ends[number + 1])
                of_block = numbers[new_rows[begin:end]]
                place_of[of_block] = num_kept[number] + np.arange(end - begin)
                num_kept[number] += end - begin
                of_rows = in_order.slice(begin, end - begin)
                self._keep(reader, of_rows, chunks[number], is_copied=True)
        refused = self.report.nodes[ntype].refused
        self._note_malformed(reader, refused, is_numbered=key is None)
        report.num_missing = int(np.count_nonzero(place_of < 0))
        columns = {}
        for name in needed:
            pieces = [piece for of_block in chunks for piece in of_block.pop(name)]
            values = reader.whole_column(name, pieces, self.kept)
            columns[name] = self._in_order(values, place_of, num_kept, size)
        return columns

    def _in_order(self, values: Any, place_of: Int64Array, num_rows: Int64Array, size: int) -> Any:
        """A column with a row for each node, null where it has none.

        Args:
            values: The rows of the first block of nodes, then those of the next, and so on.
            place_of: Where among the rows of its block that of each node is, or -1.
            num_rows: How many rows each block has.
            size: How many nodes are in a block.
        """
        import pyarrow

        ordered, first = [], 0
        is_dictionary = pyarrow.types.is_dictionary(values.type)
        kind = values.type.value_type if is_dictionary else values.type
        for number, count in enumerate(num_rows.tolist()):
            places = place_of[number * size : (number + 1) * size]
            chunks = [_plain(chunk) for chunk in values.slice(first, count).chunks]
            first += count
            rows = pyarrow.nulls(len(places), kind)
            if count:
                together = pyarrow.chunked_array(chunks, kind).combine_chunks()
                rows = together.take(pyarrow.array(places, mask=places < 0))
            ordered.append(self.kept.put(rows.dictionary_encode() if is_dictionary else rows))
        if is_dictionary:
            kind = pyarrow.dictionary(pyarrow.int32(), kind)
        return self.kept.column(ordered, kind)

    def _keep(
        self,
        reader: TableSource,
        rows: Any,
        chunks: Mapping[str, list[Any]],
        is_copied: bool = False,
    ) -> None:
        """Put the columns of a batch away, each in the type that it has in all files.

        Args:
            is_copied: The rows are no part of a table in memory, even if it was read.
        """
        is_there = reader.format == "memory" and not is_copied
        for name, pieces in chunks.items():
            values, kind = rows.column(name), reader.schema.field(name).type
            values = values if values.type == kind else values.cast(kind)
            pieces.append(values if is_there else self.kept.put(values))

    def _filtered(self, values: Any, is_kept: NDArray[np.bool_]) -> Any:
        """Some rows of a column."""
        pieces, start = [], 0
        for chunk in self.kept.passing(values.chunks):
            rows = chunk.filter(arrow_array(np.asarray(is_kept[start : start + len(chunk)])))
            pieces.append(self.kept.put(rows))
            start += len(chunk)
        return self.kept.column(pieces, values.type)

    def fill(self, ntype: str, count: int) -> None:
        """Missing values for the nodes that edges have added to a table."""
        import pyarrow

        for name, values in self.columns[ntype].items():
            more = count - len(values)
            if more:
                nulls = pyarrow.nulls(more, values.type)
                self.columns[ntype][name] = pyarrow.chunked_array([*values.chunks, nulls])

    # ------------------------------------------------------------------ edges

    def read_edges(self, etype: CanonicalEType, table: EdgeTable) -> None:
        import pyarrow

        (reader,) = self.readers[etype]
        names = table.source, table.target
        needed = self._needed(etype, table, reader, reader.schema.names, names, _indices(reader))
        report = EdgeReport(source_column=names[0], target_column=names[1])
        self.report.edges[etype] = report
        report.unused = _unused(reader.schema.names, needed, *names, indices=_indices(reader))
        chunks: dict[str, list[Any]] = {column: [] for column in needed}
        ends = self.arrays.ends(reader.known_num_rows())
        with ThreadPoolExecutor(1) as pool:
            asked = list(dict.fromkeys([*names, *needed]))
            for batch in reader.batches(asked, rows_at_once()):
                report.num_rows += len(batch.columns)
                kept = self._edges_of(etype, batch, names, reader, report, pool, ends)
                self._keep(reader, kept, chunks)
        self._note_malformed(reader, report.refused)
        # What comes next writes to pages that are new unless those of batches are there again.
        pyarrow.default_memory_pool().release_unused()
        src, dst = ends.arrays()
        if report.dangling and not len(src):
            raise ValueError(self._no_edge(etype, reader, report))
        if reader.num_malformed and not report.num_rows:
            reader.check_cells("say by what cells are separated, or whether there is a header")
        columns = {name: reader.whole_column(name, chunks.pop(name), self.kept) for name in needed}
        num_nodes = len(self.ids[etype[0]]), len(self.ids[etype[2]])
        is_dropping = self.tables.parallel == "drop"
        report.num_parallel, is_first = _parallel(self.arrays, (src, dst), num_nodes, is_dropping)
        if is_first is not None and report.num_parallel:
            src, dst = (self.arrays.chosen(end, is_first) for end in (src, dst))
            columns = {name: self._filtered(values, is_first) for name, values in columns.items()}
        report.is_parallel_dropped = is_first is not None
        if etype[0] == etype[2] and is_first is not None:  # else they were counted on the way
            report.num_self_loops = 0
            for block in self.arrays.blocks(src, dst):
                report.num_self_loops += int(np.count_nonzero(src[block] == dst[block]))
        report.num_edges = len(src)
        self.ends[etype] = src, dst
        self.columns[etype] = columns

    def _no_edge(self, etype: CanonicalEType, reader: TableSource, report: EdgeReport) -> str:
        """What is said where no edge leads to nodes."""
        rule = f"{reader.name}: no edge of {etype_key(etype)} has both ends among the nodes, of "
        rule += f"{report.num_rows:,} rows"
        bad = self.report.first[-1] if self.report.first else None
        columns = ", ".join(reader.telling_names[:_MOST_NAMES])
        cure = f"name other columns with --source and --target (of {columns}), the nodes' with "
        cure += "--node-id, or pass --dangling add"
        if bad is None:
            return f"{rule}; {cure}"
        rule += f" (got {bad.value!r} in row {bad.row}, column {bad.column!r}"
        ids = self.ids[etype[0] if bad.column == report.source_column else etype[2]]
        like = next((i for i in _spellings(str(bad.value)) if ids.has_text(i)), None)
        if like is not None:
            return f"{rule}, where the table of nodes has {like!r}); write both alike"
        few = ", ".join(repr(shown_id(i)) for i in ids.arrow()[:3])
        if not few:
            return f"{rule}, where the table of nodes has no row); fill it, or pass --dangling add"
        return f"{rule}, where ids of nodes are {few}); {cure}"

    def _edges_of(
        self,
        etype: CanonicalEType,
        batch: TableBatch,
        names: tuple[str, str],
        reader: TableSource,
        report: EdgeReport,
        pool: ThreadPoolExecutor,
        ends_of_all: EdgeEnds,
    ) -> Any:
        """The rows of a batch that are edges; their two ends are added to those before."""
        kept = batch.columns
        places: Int64Array | None = None
        values = [kept.column(name) for name in names]
        if any(column.null_count for column in values):
            both = dict(zip(names, values, strict=True))
            places = self._refuse_nulls(batch, both, report.refused, "an end of an edge")
            kept = kept.take(arrow_array(places))
            values = [kept.column(name) for name in names]
        ends = [self.ids[etype[0]], self.ids[etype[2]]]
        columns = [IdColumn(f"{batch.file}, column {n!r}", reader.is_untyped) for n in names]
        # Of the first rows it is seen what kind of ids there are; later look-ups change nothing.
        is_free = ends[0] is not ends[1] or report.num_rows > len(batch.columns)
        most = max(map(len, ends)) + 2 * len(kept)  # where each end is a new node
        found = ends_of_all.room(len(kept), most)
        other = pool.submit(ends[0].find, values[0], columns[0], found[0]) if is_free else None
        if other is None:
            ends[0].find(values[0], columns[0], found[0])
        ends[1].find(values[1], columns[1], found[1])
        if other is not None:
            other.result()
        if all(rows.min(initial=0) >= 0 for rows in found):
            self._keep_ends(etype, ends_of_all, None, report)
            return kept
        self._add_new(etype, values, columns, found, report)
        is_edge = np.ones(len(kept), bool)
        bad: list[tuple[int, int]] = []
        for side, rows in enumerate(found):
            missing = np.flatnonzero(rows < 0)
            if len(missing):
                is_edge[missing] = False
                report.dangling[names[side]] = report.dangling.get(names[side], 0) + len(missing)
                few = missing[: self.report.num_wanted()].tolist()
                bad += [(index, side) for index in few]
        for index, side in sorted(bad):
            place = index if places is None else int(places[index])
            self.report.note(
                BadRow(
                    file=batch.file,
                    row=batch.row_number(place),
                    column=names[side],
                    value=shown_id(values[side][index]),
                    problem=f"no node of type {etype[2 * side]} has this id",
                    cure="add the node, or pass --dangling add",
                )
            )
        if self.tables.dangling == "error" and not is_edge.all():
            index = int(np.flatnonzero(~is_edge)[0])
            side = 0 if found[0][index] < 0 else 1
            place = index if places is None else int(places[index])
            raise ValueError(
                f"{batch.file}, row {batch.row_number(place)}, column {names[side]!r}: the end of "
                f"an edge must be a node of type {etype[2 * side]}, as --dangling error asks (got "
                f"{shown_id(values[side][index])!r}); add the node, or pass --dangling drop or add"
            )
        self._keep_ends(etype, ends_of_all, is_edge, report)
        return kept.filter(arrow_array(is_edge))

    def _keep_ends(
        self,
        etype: CanonicalEType,
        ends_of_all: EdgeEnds,
        is_edge: NDArray[np.bool_] | None,
        report: EdgeReport,
    ) -> None:
        """Take the ends of the rows that are edges, and count loops while they are in the cache."""
        src, dst = ends_of_all.keep(is_edge)
        if etype[0] == etype[2]:
            report.num_self_loops += int(np.count_nonzero(src == dst))

    def _add_new(
        self,
        etype: CanonicalEType,
        values: Sequence[Any],
        columns: Sequence[IdColumn],
        found: list[NDArray[Any]],
        report: EdgeReport,
    ) -> None:
        """Make nodes of the ends that are none, row by row, the source before the target."""
        import pyarrow

        grows = [
            ntype not in self.tables.nodes or self.tables.dangling == "add"
            for ntype in (etype[0], etype[2])
        ]
        none = np.zeros(0, np.int64)
        places = [
            np.flatnonzero(rows < 0) if is_growing else none
            for rows, is_growing in zip(found, grows, strict=True)
        ]
        before = [len(self.ids[etype[0]]), len(self.ids[etype[2]])]
        if etype[0] != etype[2]:
            for side, of_side in enumerate(places):
                if len(of_side):
                    new = values[side].take(arrow_array(of_side))
                    found[side][of_side] = self.ids[etype[2 * side]].add(new, columns[side])
        elif grows[0]:
            order = np.argsort(np.concatenate([2 * places[0], 2 * places[1] + 1]), kind="stable")
            both = [_plain(column) for column in values]
            both = [column.take(arrow_array(at)) for column, at in zip(both, places, strict=True)]
            new = pyarrow.concat_arrays(of_one_type(self.ids[etype[0]], both, columns))
            rows = np.empty(len(order), np.int64)
            rows[order] = self.ids[etype[0]].add(new.take(arrow_array(order)), columns[0])
            found[0][places[0]] = rows[: len(places[0])]
            found[1][places[1]] = rows[len(places[0]) :]
        for side, ntype in enumerate((etype[0], etype[2])):
            if side == 0 or etype[0] != etype[2]:
                self.report.nodes[ntype].num_from_edges += len(self.ids[ntype]) - before[side]

    # ------------------------------------------------------------------ what was wrong

    def _refuse_nulls(
        self, batch: TableBatch, columns: Columns, refused: dict[str, int], what: str
    ) -> Int64Array:
        """Rows of a batch in which none of the columns is empty."""
        is_whole = np.ones(len(batch.columns), bool)
        bad: list[tuple[int, str]] = []
        for name, values in columns.items():
            if not values.null_count:
                continue
            is_null = values.is_null().to_numpy(zero_copy_only=False)
            is_whole &= ~is_null
            key = f"empty {name}"
            refused[key] = refused.get(key, 0) + int(is_null.sum())
            few = np.flatnonzero(is_null)[: self.report.num_wanted()]
            bad += [(index, name) for index in few.tolist()]
        for index, name in sorted(bad):
            self.report.note(
                BadRow(
                    file=batch.file,
                    row=batch.row_number(index),
                    column=name,
                    value="",
                    problem=f"{what} is empty",
                    cure="fill it, or drop the row",
                )
            )
        return np.flatnonzero(is_whole)

    def _note_malformed(
        self, reader: TableSource, refused: dict[str, int], *, is_numbered: bool = False
    ) -> None:
        """Report rows with a wrong number of cells.

        Args:
            is_numbered: Whether ids are numbers of rows, which such rows would shift.
        """
        if not reader.num_malformed:
            return
        if is_numbered:
            row = reader.malformed[0]
            raise ValueError(
                f"{row.file} must have {row.num_columns} cells in every row, as its rows go by "
                f"their numbers (got {row.num_cells} in row {row.row}); mend the row"
            )
        refused["wrong number of cells"] = reader.num_malformed
        for row in reader.malformed:
            self.report.note(
                BadRow(
                    file=row.file,
                    row=row.row,
                    column="",
                    value=row.text[:80],
                    problem=f"{row.num_cells} cells in place of {row.num_columns}",
                    cure="quote cells that hold the delimiter",
                )
            )

    # ------------------------------------------------------------------ columns

    def _needed(
        self,
        owner: Any,
        table: NodeTable | EdgeTable,
        reader: TableSource,
        names: Sequence[str],
        ids: Sequence[str],
        indices: set[str],
    ) -> list[str]:
        """The columns that are kept until they are encoded; notes what features they make.

        Args:
            names: All that there are, in this table and in those that are joined to it.
            ids: Those that name nodes.
            indices: Those with the numbers of rows.
        """
        roles = [*label_columns(table.label), *split_columns(table.split)]
        if isinstance(table, EdgeTable):
            roles += [c for c in (table.weight, table.time, table.relation_column) if c is not None]
        is_node = isinstance(table, NodeTable)
        given = self._given("nodes" if is_node else "edges", owner if is_node else etype_key(owner))
        left_out = {*ids, *roles, *table.ignore, *indices}
        free = [name for name in names if name not in left_out]
        if given is not None:
            features = {
                encoding.column: _Feature(None, encoding.columns or (encoding.column,))
                for encoding in given
            }
            parts = [name for feature in features.values() for name in feature.columns]
            if missing := [name for name in parts if name not in names]:
                raise ValueError(
                    f"{reader.name}: column {missing[0]!r} is missing, which the other partition "
                    f"encodes; add it, with empty cells where it is not known (there are "
                    f"{', '.join(map(repr, names))})"
                )
        elif table.features is None:
            features = {name: _Feature(None, (name,)) for name in free}
        else:
            features = _features(table.features, names, free, reader)
        self.features[owner] = features
        columns = [name for feature in features.values() for name in feature.columns]
        return list(dict.fromkeys([*columns, *roles]))

    # ------------------------------------------------------------------ features

    def encode(
        self,
        owner: Any,
        table: NodeTable | EdgeTable,
        given: list[Encoding] | None,
        is_training: NDArray[np.bool_] | None,
        fields: Any,
        report: NodeReport | EdgeReport,
    ) -> list[Encoding]:
        """Make the fields ``feat`` and ``categories`` of the columns of a type."""
        columns = self.columns[owner]
        roles: set[Any] = {*label_columns(table.label), *split_columns(table.split)}
        roles |= {getattr(table, name, None) for name in ("weight", "time", "relation_column")}
        if given is not None:
            encodings = given
        else:
            encodings = []
            is_asked = table.features is not None
            for name, feature in self.features[owner].items():
                is_named = is_asked and not feature.is_any
                fit = self._fit(owner, name, feature, columns, is_training, is_named)
                if isinstance(fit, str):
                    report.unused[name] = fit
                    del columns[name]
                else:
                    encodings.append(fit)
        num_rows = report.num_rows_of_fields
        wide = sum(encoding.width for encoding in encodings)
        embedded = [encoding for encoding in encodings if encoding.kind == "embedding"]
        bags = [encoding for encoding in encodings if encoding.kind == "embedding-bag"]
        longest = [self._longest(bag, columns[bag.column]) for bag in bags]
        feat = self.arrays.empty((num_rows, wide), np.float32)
        categories = self.arrays.empty((num_rows, len(embedded)), np.int64)
        words = self.arrays.zeros((num_rows, sum(longest)), np.int32)
        start = 0
        for encoding in encodings:
            counts = EncodedCounts()
            num_before = 0  # words of other columns
            if encoding.kind == "embedding":
                out: NDArray[Any] = categories[:, embedded.index(encoding)]
            elif encoding.kind == "embedding-bag":
                place = bags.index(encoding)
                num_before = sum(len(bag.values) for bag in bags[:place])
                out = words[:, sum(longest[:place]) : sum(longest[: place + 1])]
            else:
                out = feat[:, start : start + encoding.width]
                start += encoding.width
            row = 0
            try:
                pieces = _chunks(encoding.column, encoding.columns, columns)
                for chunk in self.kept.passing(pieces):
                    rows = encoding.encode(chunk, first_row=row, counts=counts)
                    if encoding.kind == "embedding-bag":
                        rows[rows > 0] += num_before
                        out[row : row + len(chunk), : rows.shape[1]] = rows
                    else:
                        out[row : row + len(chunk)] = rows
                    row += len(chunk)
                    self.arrays.release(feat, categories, words)
            except ValueError as error:
                raise ValueError(f"{name_of_table(owner)}: {error}") from None
            for name in encoding.columns or (encoding.column,):
                if name not in roles:
                    del columns[name]
            report.features.append(
                FeatureReport(
                    column=encoding.column,
                    encoding=encoding.kind,
                    type=encoding.type + _cut(encoding.separator),
                    width=encoding.width,
                    num_missing=counts.missing,
                    num_unknown=counts.unknown,
                    num_rows=num_rows,
                )
            )
        counted = [e for e in encodings if e.kind == "standardized" and "int" in e.type]
        if given is None and len(counted) >= _MANY_COLUMNS:
            self.report.notes.append(
                f"{len(counted)} columns of whole numbers of {spoken_type(owner)} were "
                'standardized one by one; where they count words, name them in features as "*" = '
                '{encoding = "vector", row_normalize = true}'
            )
        if wide:
            fields["feat"] = feat
        if embedded:
            fields["categories"] = categories
        if bags:
            fields["feat_columns"] = words
            fields["feat_values"] = self._ones_where(words)
        return encodings

    def _longest(self, bag: Encoding, values: Any) -> int:
        """How many words a row has at most."""
        return max(1, *map(bag.longest, self.kept.passing(values.chunks)), 1)

    def _ones_where(self, words: NDArray[np.int32]) -> NDArray[np.float32]:
        """1 where a row has a word, and 0 behind its last."""
        ones: NDArray[np.float32] = self.arrays.empty(words.shape, np.float32)
        for block in self.arrays.blocks(words, ones):
            ones[block] = words[block] > 0
        return ones

    def _fit(
        self,
        owner: Any,
        name: str,
        feature: _Feature,
        columns: Columns,
        is_training: NDArray[np.bool_] | None,
        is_asked: bool,
    ) -> Encoding | str:
        """The encoding of a feature; or why a column that was not asked for is left out."""
        import pyarrow

        options: dict[str, Any] = dict(feature.asked) if isinstance(feature.asked, Mapping) else {}
        if isinstance(feature.asked, str):
            options["encoding"] = feature.asked
        limit = options.get("one_hot_limit", ONE_HOT_LIMIT)
        joined = () if feature.columns == (name,) else feature.columns
        if joined:
            kind = pyarrow.list_(pyarrow.float64(), len(joined))
        else:
            values = columns[name]
            kind = values.type
            if not is_asked and (len(values) == 0 or values.null_count == len(values)):
                return "all of it is empty"
            if (
                not is_asked
                and is_training is not None
                and not self._has_value(values, is_training)
            ):
                return "no training row has a value in it"
        try:
            fit = EncodingFit(pyarrow.field(name, kind), options, joined)
            row = 0
            for chunk in self.kept.passing(_chunks(name, joined, columns)):
                rows = slice(row, row + len(chunk))
                fit.update(chunk, None if is_training is None else np.asarray(is_training[rows]))
                row += len(chunk)
            encoding = fit.finish()
            if encoding.kind == "embedding-bag" and not isinstance(owner, str):
                raise ValueError(
                    f"column '{name}' of edges must have at most {limit} different words (got "
                    f"{len(encoding.values)}); raise one_hot_limit, or leave it out"
                )
        except ValueError as error:
            if is_asked:
                raise ValueError(f"{name_of_table(owner)}: {error}") from None
            hint = "" if options else self._words_of(name, columns)
            return f"{error}. Or {hint}" if hint else str(error)
        is_of_cells = not options and encoding.kind in ("category", "embedding")
        if is_of_cells and (hint := self._words_of(name, columns)):
            self.report.notes.append(
                f"column {name!r} of {spoken_type(owner)} became one category for each cell, "
                f"though {hint}"
            )
        return encoding

    def _words_of(self, name: str, columns: Columns) -> str:
        """What is said of a column whose cells look like several words; "" of others."""
        found = evident_separator(columns[name].slice(0, ROWS_OF_SEPARATORS), name)
        if found is None:
            return ""
        separator, why = found
        return (
            f"{why}: --separator '{name}={separator}' takes each word for itself, as does {name} = "
            f'{{separator = "{separator}"}} among the features in a TOML file'
        )

    def _has_value(self, values: Any, chosen: Any) -> bool:
        """Whether any of the chosen rows is neither null nor NaN."""
        from pyarrow import compute

        is_real, row = family_of(values.type) == "number", 0
        for chunk in self.kept.passing(values.chunks):
            rows = chosen[row : row + len(chunk)]
            row += len(chunk)
            is_null = compute.is_null(chunk, nan_is_null=True) if is_real else chunk.is_null()
            if (~is_null.to_numpy(zero_copy_only=False) & rows).any():
                return True
        return False

    def add_weight_and_time(self, etype: CanonicalEType, table: EdgeTable, fields: Any) -> None:
        import pyarrow

        report, columns = self.report.edges[etype], self.columns[etype]
        if table.weight is not None:
            values = columns.pop(table.weight)
            weight = self.arrays.empty(len(values), np.float32)
            start, is_finite = 0, True
            try:
                for chunk in self.kept.passing(values.chunks):
                    numbers = chunk.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
                    with np.errstate(over="ignore"):
                        of_chunk = numbers.astype(np.float32)
                    is_missing = np.isnan(of_chunk)
                    report.num_without_weight += int(is_missing.sum())
                    of_chunk[is_missing] = 1.0
                    is_finite &= bool(np.isfinite(of_chunk).all())
                    weight[start : start + len(chunk)] = of_chunk
                    start += len(chunk)
                    self.arrays.release(weight)
            except pyarrow.ArrowException:
                raise ValueError(
                    f"weight of {etype_key(etype)} must be a column of numbers (got "
                    f"{table.weight!r} of {values.type}{_such_as(values)}); write numbers such as "
                    "1.5, or leave it out"
                ) from None
            if not is_finite:
                raise ValueError(f"weight of {etype_key(etype)} must be finite in float32")
            fields["weight"] = weight
        if table.time is not None:
            fields["time"] = self._times(etype, table.time, columns.pop(table.time))

    def _times(self, etype: CanonicalEType, name: str, values: Any) -> NDArray[np.int64]:
        """The times of edges; the earliest where there is none."""
        import pyarrow
        from pyarrow import compute

        types, kind = pyarrow.types, values.type
        is_time = types.is_date(kind) or types.is_timestamp(kind)
        if not (is_time or types.is_floating(kind) or types.is_integer(kind)):
            raise ValueError(
                f"time of {etype_key(etype)} must be a column of times or numbers (got "
                f"{name!r} of {kind}{_such_as(values)}); write times as 2024-01-31 or "
                "2024-01-31 10:00:00"
            )
        self.report.edges[etype].num_without_time = values.null_count
        times = self.arrays.empty(len(values), np.int64)
        missing, earliest, start = [], None, 0
        for chunk in self.kept.passing(values.chunks):
            if is_time:
                try:
                    chunk = chunk.cast(pyarrow.timestamp("ns"))
                except pyarrow.ArrowInvalid:
                    raise ValueError(
                        f"time of {etype_key(etype)} must be between 1678 and 2261, as it is kept "
                        f"in nanoseconds (got {kind} from {compute.min(values)} to "
                        f"{compute.max(values)} in {name!r}); give it as whole seconds"
                    ) from None
            elif types.is_floating(kind):
                chunk = compute.round(chunk)
            chunk = chunk.cast(pyarrow.int64())
            if chunk.null_count < len(chunk):
                lowest = compute.min(chunk).as_py()
                earliest = lowest if earliest is None else min(earliest, lowest)
            if chunk.null_count:
                is_null = chunk.is_null().to_numpy(zero_copy_only=False)
                missing.append(start + np.flatnonzero(is_null))
                chunk = chunk.fill_null(0)
            times[start : start + len(chunk)] = chunk.to_numpy()
            start += len(chunk)
            self.arrays.release(times)
        for rows in missing:
            times[rows] = 0 if earliest is None else earliest
            self.arrays.release(times)
        return times

    def add_relation_numbers(
        self, etype: CanonicalEType, column: str, fields: Any
    ) -> tuple[str, ...]:
        """Number the relations that a column names; their names."""
        import pyarrow
        from pyarrow import compute

        values = self.columns[etype].pop(column)
        if values.null_count:
            raise ValueError(
                f"{name_of_table(etype)}: each row must have a relation (got {values.null_count} "
                f"rows without one in {column!r}); fill them in or drop them"
            )
        chunks = self.kept.passing(values.chunks)
        of_chunks = [_plain(compute.unique(chunk)) for chunk in chunks]
        names = compute.unique(pyarrow.chunked_array(of_chunks, plain_type(values.type)))
        names = names.take(compute.sort_indices(names))
        texts = tuple(map(str, names.to_pylist()))
        known = () if self.given_task is None else self.given_task.relation_names
        half = len(known) // 2  # inverses are added again, where they are asked for
        if known[half:] == inverse_names(known[:half]):
            known = known[:half]
        if known:
            unknown = [text for text in texts if text not in known]
            if unknown:
                raise ValueError(
                    f"{name_of_table(etype)}: {len(unknown)} relations in {column!r} are not those "
                    f"of the encodings (got {unknown[0]!r}); leave their edges out"
                )
            number = {name: place for place, name in enumerate(known)}
            of_values = np.array([number[text] for text in texts], np.int64)
            texts = known
        else:
            of_values = np.arange(len(texts))
        numbers, start = self.arrays.empty(len(values), np.int64), 0
        for chunk in self.kept.passing(values.chunks):
            places = compute.index_in(_plain(chunk), value_set=names).to_numpy(zero_copy_only=False)
            numbers[start : start + len(chunk)] = of_values[places.astype(np.int64)]
            start += len(chunk)
            self.arrays.release(numbers)
        fields["etype"] = numbers
        return texts


def _reader(
    table: NodeTable | EdgeTable | JoinedTable,
    base: str | Path | None,
    of: NodeTable | EdgeTable | None = None,
) -> TableSource:
    """What reads a table.

    Args:
        of: The table that it is joined to.
    """
    return TableSource(table.files, table.options, base=base, named=named_columns(table, of))


class _Feature(NamedTuple):
    """What becomes of columns.

    Args:
        asked: The encoding, or it and its options; None: that of the type.
        columns: The column of the name of the feature; or those that become one vector.
        is_any: It is one of those that a name with * or ? stands for, by its type; where it cannot
            be a feature, it is left out.
    """

    asked: str | Mapping[str, Any] | None
    columns: tuple[str, ...]
    is_any: bool = False


def _features(
    asked: Sequence[str] | Mapping[str, Any],
    names: Sequence[str],
    free: Sequence[str],
    reader: TableSource,
) -> dict[str, _Feature]:
    """The features that are asked for, where a name with * or ? stands for all that it matches.

    Args:
        names: The columns that there are.
        free: Those that have no other role.
    """
    ways = asked if isinstance(asked, Mapping) else dict.fromkeys(asked)
    ways = {name: None if way == BY_TYPE else way for name, way in ways.items()}
    columns = {
        name: name if name in names else reader.column(name)
        for name in ways
        if name in names or not set(name) & set("*?")
    }
    taken = set(columns.values())
    features: dict[str, _Feature] = {}
    for name, way in ways.items():
        if name in columns:
            features[columns[name]] = _Feature(way, (columns[name],))
            continue
        expression = re.escape(name).replace(r"\*", ".*").replace(r"\?", ".")
        matching = [c for c in free if c not in taken and re.fullmatch(expression, c, re.DOTALL)]
        if not matching and not (isinstance(asked, Mapping) and asked[name] == BY_TYPE):
            raise ValueError(
                f"{reader.name}: the features {name!r} must match a column without another role "
                f"(got {', '.join(map(repr, names[:20]))}); name one that is there"
            )
        taken |= set(matching)
        encoding = way if isinstance(way, str) or way is None else way.get("encoding")
        if encoding == "vector":
            features[name] = _Feature(way, tuple(matching))
        else:
            is_any = encoding is None
            features |= {column: _Feature(way, (column,), is_any) for column in matching}
    return features


def _chunks(name: str, joined: Sequence[str], columns: Columns) -> Iterable[Any]:
    """Arrays of what is encoded: a column, or several side by side."""
    return vectors_of(columns, joined, name) if joined else columns[name].chunks


# ---------------------------------------------------------------------- small things


def _cut(separator: str | None) -> str:
    """What is added to the type of a column that is cut into words."""
    return "" if separator is None else f", cut at {separator}"


def _plain(values: Any) -> Any:
    """Without a dictionary, so that columns can be joined."""
    import pyarrow

    is_dictionary = pyarrow.types.is_dictionary(values.type)
    return values.dictionary_decode() if is_dictionary else values


def _such_as(values: Any) -> str:
    """A value of a column, for a message; of text one that reads as no number or time."""
    for value in values.drop_null().slice(0, 1).to_pylist():
        return f", such as {value!r:.40}"
    return ""


def _spellings(text: str) -> list[str]:
    """How another program may have written an id: 7, 007, 7.0; with blanks; in another case."""
    word = text.strip()
    bare = word.removesuffix(".0").lstrip("0") or "0"
    padded = [bare.zfill(width) for width in range(len(bare), len(bare) + 8)]
    others = [word, f" {word}", f"{word} ", word.lower(), word.upper(), word.title()]
    return [*padded, f"{bare}.0", *(other for other in others if other != text)]


def _unused(
    names: Sequence[str], needed: Sequence[str], *roles: str | None, indices: set[str]
) -> dict[str, str]:
    """Columns that are not read, and why."""
    reasons = "not asked for", "the number of a row, as pandas writes it"
    unread = [name for name in names if name not in needed and name not in roles]
    return {name: reasons[name in indices] for name in unread}


def _indices(*readers: TableSource) -> set[str]:
    """Columns that are the number of a row, as pandas writes it."""
    return {name for reader in readers for name in reader.schema.names if reader.is_index(name)}


def _first_of_each(rows: Int64Array, before: int) -> NDArray[np.bool_]:
    """Which rows are the first with their number, where numbers below ``before`` came earlier.

    New numbers ascend in the order of their first rows.
    """
    highest = np.maximum.accumulate(rows)
    is_first = np.empty(len(rows), bool)
    if len(rows):
        is_first[0] = rows[0] >= before
        is_first[1:] = (rows[1:] > highest[:-1]) & (rows[1:] >= before)
    return is_first


def _parallel(
    arrays: Arrays, ends: EndArrays, num_nodes: tuple[int, int], is_dropping: bool
) -> tuple[int, NDArray[np.bool_] | None]:
    """How many edges have the ends of an earlier one; and which are first, if that is asked."""
    src, dst = ends
    if arrays.folder is None:
        if not is_dropping:
            return count_repeated(src, dst, *num_nodes), None
        is_first = np.zeros(len(src), bool)
        keys = src.astype(np.int64) * num_nodes[1] + dst
        is_first[np.unique(keys, return_index=True)[1]] = True
        return int(np.count_nonzero(~is_first)), is_first
    edges = edge_list(arrays, src, dst, num_nodes)
    if not is_dropping:
        if len(src) <= _MOST_AT_ONCE:
            return count_repeated(np.asarray(src), np.asarray(dst), *num_nodes), None
        return edge_lists.count_repeated(edges, arrays.folder), None
    first = arrays.empty(len(src), np.int64)
    edge_lists.find_first_edges(edges, arrays.folder, first)
    is_first, num_repeated = arrays.empty(len(src), bool), 0
    for block in arrays.blocks(first, is_first):
        is_first[block] = first[block] == np.arange(block.start, block.start + len(first[block]))
        num_repeated += int(np.count_nonzero(~is_first[block]))
    return num_repeated, is_first
