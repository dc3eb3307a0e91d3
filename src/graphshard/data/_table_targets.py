# SPDX-License-Identifier: Apache-2.0
"""The targets of tables: labels of the rows that there is something to predict for, and splits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._base.typing import CanonicalEType
from ..partition.edge_lists import find_first_edges
from ..partition.format import etype_key
from ._array_graph import ArrayGraph, Arrays, EndArrays
from ._columns import as_text, chunks_of, evident_separator, plain
from ._kept_columns import KeptColumns
from ._row_ids import IdColumn, Int64Array, RowIds, number_pairs, rows_at_once
from ._table_files import FileOptions, TableSource
from ._table_report import LabelReport, TableReport, shown_id
from .encodings import EncodedCounts
from .labels import LabelFit, Labels
from .splits import (
    SPLITS,
    Masks,
    split_by_fractions,
    split_by_masks,
    split_by_names,
    split_by_rows,
    split_by_time,
)
from .tables import (
    DEFAULT_FRACTIONS,
    ROWS_OF_SEPARATORS,
    EdgeTable,
    NodeTable,
    Tables,
    label_columns,
)
from .task import TaskInfo

_BLOCK_ROWS = 1 << 20
_LIKE_MISSING = {"unknown", "?", "-", "none", "missing", "unlabeled", "unlabelled", "n.a."}


@dataclass(frozen=True, kw_only=True)
class TableTargets:
    """What the labels and splits of a graph are made of.

    Args:
        name: Of the graph, for the task.
        given_task: The task whose labels are used; None: they are found in the tables.
        columns: Of each node type and relation, with those of labels and splits.
        ids: Of the nodes, by type, for splits that are files of ids.
        kept: Where columns that are made of others wait.
        report: Is told what was found.
    """

    tables: Tables
    name: str
    given_task: TaskInfo | None
    columns: Mapping[Any, dict[str, Any]]
    ids: Mapping[str, RowIds]
    kept: KeptColumns
    report: TableReport

    @property
    def given(self) -> dict[str, Any] | None:
        """The schema of the task that is given."""
        return None if self.given_task is None else self.given_task.schema

    def fill(self, graph: ArrayGraph) -> tuple[TaskInfo, dict[Any, NDArray[np.bool_]]]:
        """Give the targets their labels and splits; the task, and which rows are for training.

        The target is one node type, or any number of relations, whose labels are of one kind.
        """
        tables: dict[Any, NodeTable | EdgeTable] = {**self.tables.nodes, **self.tables.edges}
        asked = [owner for owner, table in tables.items() if table.label is not None]
        asked = asked or [owner for owner, table in tables.items() if table.split is not None]
        if not asked:
            return self._task_of_others(graph), {}
        first = tables[asked[0]]
        for target in asked:
            if isinstance(target, str) and tables[target].label is None:
                raise ValueError(
                    f"the table of {target} has a split and no label; say label, too, or put the "
                    "split of link prediction into the table of edges"
                )
        report = LabelReport(
            target=" and ".join(map(spoken_type, asked)),
            task="link prediction",
            columns=label_columns(first.label),
        )
        labels: Labels | None = None
        if first.label is None:
            task = TaskInfo(name=self.name, kind="link prediction", target=tuple(asked))
        else:
            labels = self._labels({target: tables[target] for target in asked})
            task = self._task(asked[0] if isinstance(asked[0], str) else tuple(asked), labels)
            report.task = task.kind
            if labels.num_classes is not None:
                report.classes = {name or "(empty)": 0 for name in labels.class_names}
        for name in sorted(_LIKE_MISSING & {name.casefold() for name in report.classes}):
            self.report.notes.append(
                f"{name!r} is one of the classes; --null {name!r} makes such cells missing"
            )
        self.report.label = report
        is_training = {}
        for target in asked:
            mask = self._fill_target(target, tables[target], graph, task, labels, report)
            if mask.any() and self.given is None:
                is_training[target] = mask
        return task, is_training

    def _fill_target(
        self,
        target: Any,
        table: NodeTable | EdgeTable,
        graph: ArrayGraph,
        task: TaskInfo,
        labels: Labels | None,
        report: LabelReport,
    ) -> NDArray[np.bool_]:
        """Give one target its labels and splits, and count them; which rows are for training."""
        is_node = isinstance(target, str)
        fields = graph.nodes[target] if is_node else graph.edges[target]
        num_rows = graph.num_nodes[target] if is_node else graph.num_edges(target)
        columns, arrays = self.columns[target], graph.arrays
        label: NDArray[Any] | None = None
        if labels is not None:
            parts = [columns[column] for column in label_columns(table.label)]
            try:
                label = self._encoded(labels, parts, arrays, report)
            except ValueError as error:
                raise ValueError(f"{name_of_table(target)}: {error}") from None
            fields["label"] = label
        masks = self._masks(target, table, columns, label, task, graph, num_rows)
        fields |= {f"{split}_mask": mask for split, mask in masks.items()}
        counts = dict.fromkeys(masks, 0)
        shared = dict.fromkeys(itertools.combinations(masks, 2), 0)
        for block in arrays.blocks(*masks.values(), *([] if label is None else [label])):
            is_labelled = True if label is None else Labels.is_labelled(np.asarray(label[block]))
            for split, mask in masks.items():
                counts[split] += int(np.count_nonzero(mask[block] & is_labelled))
            for one, other in shared:
                is_in_both = masks[one][block] & masks[other][block]
                shared[one, other] += int(np.count_nonzero(is_in_both & is_labelled))
        for split, count in counts.items():
            report.splits[split] = report.splits.get(split, 0) + count
        for (one, other), count in shared.items():
            if count:
                self.report.notes.append(
                    f"{count:,} rows of {spoken_type(target)} are in {one} and in {other}, and "
                    "metrics of both count them; leave each in one of them"
                )
        return masks["train"]

    def _encoded(
        self, labels: Labels, parts: Sequence[Any], arrays: Arrays, report: LabelReport
    ) -> NDArray[Any]:
        """The labels of all rows, which are counted."""
        counts = EncodedCounts()
        of_none = labels.encode([part.slice(0, 0) for part in parts])
        made = arrays.empty((len(parts[0]), *of_none.shape[1:]), of_none.dtype)
        numbers = np.zeros(labels.num_classes or 0, np.int64)
        for block in arrays.blocks(made):
            some = [part.slice(block.start, block.stop - block.start) for part in parts]
            rows = labels.encode(some, first_row=block.start, counts=counts)
            made[block] = rows
            if labels.is_multilabel:
                numbers += (rows > 0).sum(axis=0)
            elif labels.num_classes is not None:
                numbers += np.bincount(rows[rows >= 0], minlength=labels.num_classes)
            self.kept.release()
        report.num_unlabelled += counts.missing
        report.num_unknown += counts.unknown
        for name, number in zip(report.classes, numbers.tolist(), strict=True):
            report.classes[name] += number
        return made

    def _task_of_others(self, graph: ArrayGraph) -> TaskInfo:
        """The task where these tables have no labels: that of the encodings, or none."""
        if self.given_task is None or self.given_task.target is None:
            return TaskInfo(name=self.name)
        task = replace(self.given_task, name=self.name, options=None)
        targets: tuple[Any, ...] = task.targets or (task.target,)
        for target in targets:
            of_nodes = isinstance(target, str)
            if target not in (graph.ntypes if of_nodes else graph.etypes):
                raise ValueError(
                    f"the tables must have the target of the encodings, {target} (got "
                    f"{', '.join(graph.ntypes)}); name types as they were named there"
                )
            fields = graph.nodes[target] if of_nodes else graph.edges[target]
            num_rows = graph.num_nodes[target] if of_nodes else graph.num_edges(target)
            if self.given is not None and self.given.get("label") is not None:
                fields["label"] = _no_labels(self.given["label"], num_rows, graph.arrays)
            for split in SPLITS:
                fields[f"{split}_mask"] = graph.arrays.zeros(num_rows, bool)
        return task

    def _labels(self, tables: Mapping[Any, NodeTable | EdgeTable]) -> Labels:
        """The classes of the targets, found in all of them or given."""
        import pyarrow

        if self.given is not None and self.given.get("label") is not None:
            return Labels.of_json(self.given["label"])
        fit: LabelFit | None = None
        kinds: list[Any] = []
        first = next(iter(tables.values())).label
        separator = first.get("separator") if isinstance(first, Mapping) else None
        for target, table in tables.items():
            said = {} if isinstance(table.label, str) else dict(table.label or {})
            names, columns = label_columns(table.label), self.columns[target]
            options = {k: said[k] for k in ("task", "max_classes", "separator") if k in said}
            try:
                if options.get("separator") != separator:
                    raise ValueError(
                        f"labels must have the separator of those of the other relations, "
                        f"{separator!r} (got {options.get('separator')!r}); say it alike"
                    )
                if fit is None:
                    kinds = [columns[name].type for name in names]
                    fields = map(pyarrow.field, names, kinds)
                    fit = LabelFit(list(fields), **options)
                if [columns[name].type for name in names] != kinds:
                    raise ValueError(
                        f"labels must be of the types of those of the other relations, "
                        f"{', '.join(map(str, kinds))} (got "
                        f"{', '.join(str(columns[name].type) for name in names)}); convert them"
                    )
                for start in range(0, len(columns[names[0]]), _BLOCK_ROWS):
                    fit.update([columns[name].slice(start, _BLOCK_ROWS) for name in names])
                    self.kept.release()
            except ValueError as error:
                raise ValueError(f"{name_of_table(target)}: {error}") from None
        assert fit is not None
        target, column = next(iter(tables)), fit.columns[0]
        found = None
        if separator is None and len(fit.columns) == 1:
            cells = self.columns[target][column].slice(0, ROWS_OF_SEPARATORS)
            found = evident_separator(cells, column)
        hint = (
            ""
            if found is None
            else f"{found[1]}: --separator '{column}={found[0]}' makes each word a class, as does "
            f'label = {{column = "{column}", separator = "{found[0]}"}} in a TOML file'
        )
        try:
            labels = fit.finish()
        except ValueError as error:
            more = f". Or {hint}" if hint else ""
            raise ValueError(f"{name_of_table(target)}: {error}{more}") from None
        if hint:
            self.report.notes.append(f"each cell of {column!r} became a class, though {hint}")
        return labels

    def _task(self, target: Any, labels: Labels) -> TaskInfo:
        of = "node" if isinstance(target, str) else "edge"
        what = "regression" if labels.num_classes is None else "classification"
        return TaskInfo(
            name=self.name,
            kind=f"{of} {what}",
            target=target,
            num_classes=labels.num_classes,
            class_names=tuple(name or "(empty)" for name in labels.class_names),
            is_multilabel=labels.is_multilabel,
            schema={"label": labels.as_json()},
        )

    def _masks(
        self,
        target: Any,
        table: NodeTable | EdgeTable,
        columns: Mapping[str, Any],
        label: NDArray[Any] | None,
        task: TaskInfo,
        graph: ArrayGraph,
        num_rows: int,
    ) -> Masks:
        split, zeros = table.split, graph.arrays.zeros
        if self.given is not None and split is None:
            return {name: zeros(num_rows, bool) for name in SPLITS}
        if split is None:
            split = DEFAULT_FRACTIONS
            shares = ", ".join(map(str, split))
            note = (
                f"no split was asked for, so rows with a label were drawn by seed "
                f"{self.tables.seed} for train, val and test: {shares}"
            )
            if note not in self.report.notes:
                self.report.notes.append(note)
        said: Mapping[str, Any]
        if isinstance(split, str):
            said = {"column": split}
        else:
            said = split if isinstance(split, Mapping) else {"fractions": list(split)}
        takes_part = None
        if label is not None:
            takes_part = graph.arrays.empty(num_rows, bool)
            for block in graph.arrays.blocks(label, takes_part):
                takes_part[block] = Labels.is_labelled(np.asarray(label[block]))
        classes = None
        if label is not None and task.kind.endswith("classification") and label.ndim == 1:
            classes = label
        try:
            if "column" in said:
                return split_by_names(columns[said["column"]], said["column"], zeros=zeros)
            if "masks" in said:
                of_splits = {n: (c, columns[c]) for n, c in said["masks"].items()}
                return split_by_masks(of_splits, zeros=zeros)
            if "files" in said:
                if isinstance(table, EdgeTable):
                    ends = graph.ends[target]
                    rows = self._edges_of_files(target, table, columns, ends, said["files"])
                else:
                    rows = self._rows_of_files(target, said["files"])
                return split_by_rows(num_rows, rows, zeros=zeros)
            fractions = said["fractions"]
            if "time" in said:
                column = said["time"]
                return split_by_time(
                    columns[column], fractions, takes_part=takes_part, name=column, zeros=zeros
                )
            if not said.get("stratify", True):
                classes = None
            if label is None:
                return self._masks_of_pairs(graph, target, fractions)
            return split_by_fractions(
                num_rows,
                fractions,
                seed=self.tables.seed,
                takes_part=takes_part,
                classes=classes,
                zeros=zeros,
            )
        except ValueError as error:
            raise ValueError(f"{name_of_table(target)}: {error}") from None

    def _masks_of_pairs(
        self, graph: ArrayGraph, etype: CanonicalEType, fractions: Sequence[float]
    ) -> Masks:
        """A random split of edges in which those between the same two nodes stay together."""
        arrays, (src, dst) = graph.arrays, graph.ends[etype]
        is_ordered = etype[0] != etype[2]
        if arrays.folder is None:
            num_pairs, number = number_pairs(src, dst, is_ordered=is_ordered)
            masks = split_by_fractions(num_pairs, fractions, seed=self.tables.seed)
            return {name: mask[number] for name, mask in masks.items()}
        first = arrays.empty(len(src), np.int64)
        find_first_edges(graph.edge_list(etype), arrays.folder, first, is_ordered=is_ordered)
        num_pairs = sum(len(rows) for _, rows in _first_rows(arrays, first))
        of_pairs = split_by_fractions(
            num_pairs, fractions, seed=self.tables.seed, zeros=arrays.zeros
        )
        masks = {name: arrays.zeros(len(src), bool) for name in SPLITS}
        done = 0
        for start, rows in _first_rows(arrays, first):
            for name, mask in masks.items():
                mask[start + rows] = of_pairs[name][done : done + len(rows)]
            done += len(rows)
            arrays.release(*masks.values(), *of_pairs.values())
        for block in arrays.blocks(first, *masks.values()):
            for mask in masks.values():
                mask[block] = mask[first[block]]
        return masks

    def _edges_of_files(
        self,
        etype: CanonicalEType,
        table: EdgeTable,
        columns: Mapping[str, Any],
        edges: EndArrays,
        files: Mapping[str, Any],
    ) -> dict[str, Int64Array]:
        """Numbers of the edges that files of pairs of ids name; all that have the same two ends.

        Files have the columns of the ends as the table of edges has, or these come first and
        second. Where a column says of which relation an edge is, it is the third.
        """
        import pyarrow

        names = [table.source, table.target]
        facts = [np.asarray(end, np.int64) for end in edges]
        relations: Any = None
        if table.relation_column is not None:
            names.append(table.relation_column)
            chunks = chunks_of(columns[table.relation_column])
            none = pyarrow.array([], pyarrow.string())
            texts = pyarrow.concat_arrays([none, *(as_text(plain(chunk)) for chunk in chunks)])
            relations = texts.unique()
            facts.append(_places(texts, relations))
        rows = {}
        for split, file in files.items():
            given = self._facts_of_file(etype, split, file, names, relations)
            of_edges, of_file = _numbered_alike(facts, given)
            rows[split] = np.flatnonzero(np.isin(of_edges, of_file))
            absent = np.flatnonzero(~np.isin(of_file, of_edges))
            if len(absent):
                row = int(absent[0])
                ends = [
                    repr(shown_id(self.ids[ntype].arrow()[int(column[row])]))
                    for ntype, column in zip((etype[0], etype[2]), given, strict=False)
                ]
                raise ValueError(
                    f"{file}: the {split} split must name edges of {etype_key(etype)} (got "
                    f"{' and '.join(ends)}, and {len(absent)} such rows); drop them, or add them "
                    "to the table of edges"
                )
        return rows

    def _facts_of_file(
        self, etype: CanonicalEType, split: str, file: Any, names: Sequence[str], relations: Any
    ) -> list[Int64Array]:
        """Numbers of the nodes at the ends of the edges that a file names, and of its relations."""
        base = self.tables.base
        reader = TableSource(file, base=base, named=names)
        chosen = [name for name in names if name in reader.schema.names]
        if len(chosen) < len(names):  # the first ones; no line of CSV is lost as a header
            reader = TableSource(file, FileOptions(header=False), base=base)
            chosen = list(reader.schema.names)[: len(names)]
        if len(chosen) < len(names):
            raise ValueError(
                f"{reader.name}: a file that splits edges must have the columns "
                f"{', '.join(names)} (got {', '.join(chosen)}); write the ids of both ends"
            )
        found: list[list[Int64Array]] = [[np.zeros(0, np.int64)] for _ in names]
        for batch in reader.batches(list(dict.fromkeys(chosen)), rows_at_once()):
            columns = [batch.columns.column(name) for name in chosen]
            if any(column.null_count for column in columns):
                raise ValueError(
                    f"{batch.file}: rows of the {split} split must name both ends of an edge (got "
                    "an empty cell); fill it, or drop the row"
                )
            numbers = []
            for side in (0, 1):
                where = f"{batch.file}, column {chosen[side]!r}"
                ids = self.ids[etype[2 * side]]
                numbers.append(ids.find(columns[side], IdColumn(where, reader.is_untyped)))
            if relations is not None:
                numbers.append(_places(as_text(plain(columns[2])), relations))
            is_there = (numbers[0] >= 0) & (numbers[1] >= 0)
            first = 0
            if reader.is_untyped and batch.first_row == 1 and len(is_there):
                first = int(numbers[0][0] < 0 and numbers[1][0] < 0)  # names of columns
            if not is_there[first:].all():
                place = first + int(np.flatnonzero(~is_there[first:])[0])
                side = 0 if numbers[0][place] < 0 else 1
                raise ValueError(
                    f"{batch.file}: the {split} split must name nodes of type {etype[2 * side]} "
                    f"(got {shown_id(columns[side][place])!r}, and "
                    f"{np.count_nonzero(~is_there[first:])} such rows); drop them"
                )
            for column, more in zip(found, numbers, strict=True):
                column.append(more[first:])
        reader.check_cells("put ids with such letters in quotes")
        return [np.concatenate(parts) for parts in found]

    def _rows_of_files(self, target: str, files: Mapping[str, Any]) -> dict[str, Int64Array]:
        """Numbers of the nodes that files of ids name."""
        rows = {}
        for split, file in files.items():
            reader = TableSource(file, FileOptions(header=False), base=self.tables.base)
            name = reader.schema.names[0]
            found = [np.zeros(0, np.int64)]
            for batch in reader.batches([name]):
                ids = batch.columns.column(name).drop_null()
                column = IdColumn(f"{batch.file}, column {name!r}", reader.is_untyped)
                numbers = self.ids[target].find(ids, column)
                missing = np.flatnonzero(numbers < 0)
                if len(missing) and batch.first_row == 1 and missing[0] == 0:
                    header = str(ids[0]).strip()  # of a file that names its column
                    if header in (self.report.nodes[target].id_column, "id", "node"):
                        numbers, missing = numbers[1:], missing[1:]
                if len(missing):
                    raise ValueError(
                        f"{batch.file}: the {split} split must name nodes of type {target} (got "
                        f"{shown_id(ids[int(missing[0])])!r}, and {len(missing)} such ids); drop "
                        "them"
                    )
                found.append(numbers)
            reader.check_cells("put ids with such letters in quotes")
            rows[split] = np.concatenate(found)
        return rows


# ---------------------------------------------------------------------- small things


def spoken_type(owner: Any) -> str:
    """A node type or relation in messages."""
    return owner if isinstance(owner, str) else etype_key(owner)


def name_of_table(owner: Any) -> str:
    """Its table in messages."""
    return f"the table of {spoken_type(owner)}"


def _first_rows(
    arrays: Arrays, first: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Of each block of edges its first one, and which of them are the first with their ends."""
    for block in arrays.blocks(first):
        own = np.arange(block.start, block.start + len(first[block]))
        yield block.start, np.flatnonzero(first[block] == own)


def _no_labels(labels: Mapping[str, Any], num_rows: int, arrays: Arrays) -> NDArray[Any]:
    """What rows without labels have, where labels are of some kind."""
    made = Labels.of_json(labels)
    shape: tuple[int, ...] = (num_rows,)
    if made.is_multilabel or (made.kind == "reals" and made.width > 1):
        shape = (num_rows, made.num_classes or made.width)
    is_real = made.kind == "reals"
    unknown = arrays.empty(shape, np.float32 if is_real else np.int64)
    for block in arrays.blocks(unknown):
        unknown[block] = np.nan if is_real else -1
    return unknown


def _places(texts: Any, words: Any) -> Int64Array:
    """Where each text stands among some words; -1 for none of them."""
    from pyarrow import compute

    places = compute.index_in(texts.cast(words.type), value_set=words).fill_null(-1)
    found: Int64Array = places.to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _numbered_alike(
    first: Sequence[Int64Array], second: Sequence[Int64Array]
) -> tuple[Int64Array, Int64Array]:
    """Numbers of the rows of two tables, given by columns from -1; the same for equal rows."""
    numbers = np.zeros(len(first[0]) + len(second[0]), np.int64)
    for columns in zip(first, second, strict=True):
        both = np.concatenate(columns) + 1
        pairs = numbers * (int(both.max(initial=0)) + 1) + both
        numbers = np.unique(pairs, return_inverse=True)[1].reshape(-1)
    return numbers[: len(first[0])], numbers[len(first[0]) :]
