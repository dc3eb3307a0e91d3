# SPDX-License-Identifier: Apache-2.0
"""TableReport: what was read from tables, for the reader and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from .._base.typing import CanonicalEType
from ..partition.format import etype_key

MOST_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that was refused, or contradicts another.

    Args:
        row: Its number in the file, from 1, header and comments left out.
        column: "" for a row as a whole.
    """

    file: str
    row: int
    column: str
    value: str
    problem: str
    cure: str

    @property
    def where(self) -> str:
        """File, row and column."""
        of_column = f", column {self.column!r}" if self.column else ""
        return f"{self.file}, row {self.row}{of_column}"

    def __str__(self) -> str:
        value = f" (got {self.value!r})" if self.value else ""
        return f"{self.where}: {self.problem}{value}; {self.cure}"


@dataclass(frozen=True, kw_only=True)
class FeatureReport:
    """What became of a column.

    Args:
        width: Columns of float32; 0 where it is numbers for a table of embeddings.
        num_unknown: Rows with a category that was not there when the encoding was made; or words,
            where a row has several.
    """

    column: str
    type: str
    encoding: str
    width: int
    num_missing: int
    num_unknown: int
    num_rows: int

    @property
    def missing_share(self) -> float:
        """Of all rows."""
        return self.num_missing / self.num_rows if self.num_rows else 0.0


@dataclass(kw_only=True)
class JoinReport:
    """Another table of a type of nodes.

    Args:
        name: Its file.
        num_rows: Its rows.
        num_without_node: Those of them whose id no node has, which count for nothing.
        num_duplicates: Those whose id stood in an earlier row, which counts.
        num_missing: Nodes that have no row in it.
    """

    name: str
    id_column: str
    num_rows: int = 0
    num_without_node: int = 0
    num_duplicates: int = 0
    num_missing: int = 0


@dataclass(kw_only=True)
class NodeReport:
    """A type of nodes.

    Args:
        id_column: None where the type has no table.
        num_rows: Rows of its table, but for those with a wrong number of cells.
        num_duplicates: Rows whose id stood in an earlier row, which counts.
        num_conflicting: Those of them that say something else than the earlier row.
        num_from_edges: Nodes that only edges have.
        refused: Why rows were refused, and how many.
        unused: Columns without a role, and why.
        joined: Other tables of the same nodes.
    """

    id_column: str | None
    num_nodes: int = 0
    num_rows: int = 0
    num_duplicates: int = 0
    num_conflicting: int = 0
    num_from_edges: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    features: list[FeatureReport] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)
    joined: list[JoinReport] = field(default_factory=list)

    @property
    def num_rows_of_fields(self) -> int:
        """Rows that a feature has."""
        return self.num_nodes


@dataclass(kw_only=True)
class EdgeReport:
    """A relation.

    Args:
        num_edges: As they were read: without reverses and self loops that were added.
        dangling: Column of an end to edges without a node there.
        num_parallel: Edges with the two ends of an earlier one.
        is_parallel_dropped: Whether these were left out.
        num_without_weight: Edges that got weight 1.
        num_without_time: Edges that got the earliest time.
    """

    source_column: str
    target_column: str
    num_edges: int = 0
    num_rows: int = 0
    dangling: dict[str, int] = field(default_factory=dict)
    num_parallel: int = 0
    is_parallel_dropped: bool = False
    num_self_loops: int = 0
    num_without_weight: int = 0
    num_without_time: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    features: list[FeatureReport] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)

    @property
    def num_rows_of_fields(self) -> int:
        """Rows that a feature has."""
        return self.num_edges


@dataclass(kw_only=True)
class LabelReport:
    """Labels and splits.

    Args:
        target: The node type, or the relation as "source:relation:target".
        classes: Name of each class to the number of rows; empty for regression.
        num_unlabelled: Rows without a label.
        num_unknown: Rows with a class that the encodings which were asked for do not have.
        splits: Split to the number of its rows that have a label.
    """

    target: str
    task: str
    columns: list[str]
    classes: dict[str, int] = field(default_factory=dict)
    num_unlabelled: int = 0
    num_unknown: int = 0
    splits: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class TableReport:
    """What was read.

    Args:
        first: The first rows that were refused or contradict others, up to ten.
        num_bad: How many there are.
    """

    nodes: dict[str, NodeReport] = field(default_factory=dict)
    edges: dict[CanonicalEType, EdgeReport] = field(default_factory=dict)
    label: LabelReport | None = None
    first: list[BadRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def num_wanted(self) -> int:
        """How many more bad rows are named."""
        return MOST_SHOWN - len(self.first)

    def note(self, row: BadRow) -> None:
        """Name a bad row, if there is room."""
        if self.num_wanted() > 0:
            self.first.append(row)

    @property
    def num_bad(self) -> int:
        """Rows that were refused, dangle, or contradict an earlier one."""
        number = sum(r.num_conflicting + sum(r.refused.values()) for r in self.nodes.values())
        for report in self.edges.values():
            number += sum(report.refused.values()) + sum(report.dangling.values())
        return number

    def as_json(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {
            "nodes": {ntype: _as_json(report) for ntype, report in self.nodes.items()},
            "edges": {etype_key(etype): _as_json(report) for etype, report in self.edges.items()},
            "label": None if self.label is None else asdict(self.label),
            "bad_rows": {"number": self.num_bad, "first": [asdict(row) for row in self.first]},
            "notes": self.notes,
        }

    def show(self, console: Console) -> None:
        """Print it."""
        console.print(self._types_table())
        if any(report.features for report in self._named().values()):
            console.print(self._features_table())
        if self.label is not None:
            console.print(self._label_table())
        for line in self.lines():
            console.print(line, soft_wrap=True, markup=False, highlight=False)

    def lines(self) -> list[str]:
        """Columns that are not used, bad rows, and what else is to be said: a line each."""
        lines = list(self.notes)
        for name, report in self._named().items():
            plain = [column for column, why in report.unused.items() if why == "not asked for"]
            if plain:
                lines.append(f"not used of {name}: {', '.join(plain)}")
            for column, why in report.unused.items():
                if why != "not asked for":
                    lines.append(f"not used of {name}: {column}, because {why}")
        if self.num_bad:
            first = f", the first {len(self.first)}" if len(self.first) < self.num_bad else ""
            lines.append(f"{self.num_bad:,} bad row{'s' * (self.num_bad > 1)}{first}:")
            lines += [f"  {row}" for row in self.first]
        return lines

    def _named(self) -> dict[str, NodeReport | EdgeReport]:
        """Reports of nodes and edges by the names of their types."""
        return {**self.nodes, **{etype_key(etype): of for etype, of in self.edges.items()}}

    def _types_table(self) -> Table:
        table = Table(title="tables", title_justify="left")
        table.add_column("type or relation", overflow="fold")
        for heading in ("rows", "kept"):
            table.add_column(heading, justify="right")
        table.add_column("of the rest, and what else there is")
        for ntype, report in self.nodes.items():
            notes = _counts(report.refused)
            notes += _counts(
                {
                    "with an id of an earlier row": report.num_duplicates,
                    "of these with other values": report.num_conflicting,
                    "only in edges": report.num_from_edges,
                }
            )
            table.add_row(
                ntype, f"{report.num_rows:,}", f"{report.num_nodes:,}", ", ".join(notes) or "-"
            )
            for joined in report.joined:
                notes = _counts(
                    {
                        "of no node": joined.num_without_node,
                        "with an id of an earlier row": joined.num_duplicates,
                        "nodes without one": joined.num_missing,
                    }
                )
                matched = joined.num_rows - joined.num_without_node - joined.num_duplicates
                numbers = f"{joined.num_rows:,}", f"{matched:,}"
                table.add_row(f"  and {joined.name}", *numbers, ", ".join(notes) or "-")
        for etype, of_edges in self.edges.items():
            notes = _counts(of_edges.refused)
            notes += _counts({f"dangling {c}": n for c, n in of_edges.dangling.items()})
            parallel = "parallel (dropped)" if of_edges.is_parallel_dropped else "parallel (kept)"
            notes += _counts(
                {
                    parallel: of_edges.num_parallel,
                    "self loops": of_edges.num_self_loops,
                    "without a weight": of_edges.num_without_weight,
                    "without a time": of_edges.num_without_time,
                }
            )
            numbers = f"{of_edges.num_rows:,}", f"{of_edges.num_edges:,}"
            table.add_row(etype_key(etype), *numbers, ", ".join(notes) or "-")
        return table

    def _features_table(self) -> Table:
        table = Table(title="features", title_justify="left")
        for heading in ("type or relation", "column", "read as"):
            table.add_column(heading, overflow="fold")
        table.add_column("encoding", overflow="fold", min_width=len("standardized"))
        named = [(name, of) for name, report in self._named().items() for of in report.features]
        is_any_unknown = any(feature.num_unknown for _, feature in named)
        for heading in ("width", "missing", *["unknown"] * is_any_unknown):
            table.add_column(heading, justify="right")
        for name, feature in named:
            cells = [name, feature.column, feature.type, feature.encoding]
            cells += [str(feature.width or "-"), f"{100 * feature.missing_share:.1f} %"]
            if is_any_unknown:
                cells.append(f"{feature.num_unknown:,}" if feature.num_unknown else "-")
            table.add_row(*cells)
        return table

    def _label_table(self) -> Table:
        label = self.label
        assert label is not None
        of = f" by {', '.join(label.columns)}" if label.columns else ""
        title = f"{label.task} of {label.target}{of}"
        table = Table(title=title, title_justify="left", min_width=len(title))
        table.add_column("class" if label.classes else "rows")
        table.add_column("number", justify="right")
        shown = list(label.classes.items())
        for name, number in shown[:_MOST_CLASSES]:
            table.add_row(name, f"{number:,}")
        if len(shown) > _MOST_CLASSES:
            rest = sum(number for _, number in shown[_MOST_CLASSES:])
            table.add_row(f"{len(shown) - _MOST_CLASSES} more classes", f"{rest:,}")
        if label.columns:
            table.add_row("without a label", f"{label.num_unlabelled:,}")
        if label.num_unknown:
            table.add_row("of an unknown class", f"{label.num_unknown:,}")
        for split, number in label.splits.items():
            table.add_row(f"in {split}", f"{number:,}")
        return table


_MOST_CLASSES = 20


def _as_json(report: NodeReport | EdgeReport) -> dict[str, Any]:
    content = asdict(report)
    for feature, made in zip(report.features, content["features"], strict=True):
        made["missing_share"] = feature.missing_share
    return content


def _counts(numbers: Mapping[str, int]) -> list[str]:
    return [f"{number:,} {what}" for what, number in numbers.items() if number]


def shown_id(value: Any) -> str:
    """An id as a message has it."""
    content = value.as_py()
    if isinstance(content, bytes):
        return content.hex()
    return str(content)[:80]
