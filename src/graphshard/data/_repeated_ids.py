# SPDX-License-Identifier: Apache-2.0
"""RepeatedIds: rows of a table of nodes with an id that came before, and what they say else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._columns import arrow_array, as_text
from ._kept_columns import KeptColumns
from ._row_ids import Int64Array, RowIds
from ._table_files import TableBatch, TableSource
from ._table_report import BadRow, NodeReport, shown_id


class RepeatedIds:
    """Rows of a table of nodes whose id stood in an earlier row, to be compared with that one."""

    def __init__(self, reader: TableSource, columns: Sequence[str], kept: KeptColumns) -> None:
        self._reader, self._columns, self._kept = reader, list(columns), kept
        self._rows: list[Int64Array] = []
        self._where: list[tuple[str, Int64Array]] = []
        self._chunks: dict[str, list[Any]] = {name: [] for name in columns}

    def add(
        self, batch: TableBatch, kept: Any, rows: Int64Array, doubled: Int64Array, places: Any
    ) -> None:
        """Keep rows of a batch.

        Args:
            kept: The rows of the batch that have an id.
            rows: Their numbers.
            doubled: Which of them are no first.
            places: Where in the batch they are; None: all are.
        """
        self._rows.append(rows[doubled])
        at = doubled if places is None else places[doubled]
        skipped = np.array(sorted(batch.skipped), np.int64)
        numbers = batch.first_row + at
        for number in skipped:
            numbers = numbers + (numbers >= number)
        self._where.append((batch.file, numbers))
        for name in self._columns:
            values, kind = kept.column(name).take(arrow_array(doubled)), self._type(name)
            values = values if values.type == kind else values.cast(kind)
            self._chunks[name].append(self._kept.put(values))

    def _type(self, name: str) -> Any:
        return self._reader.schema.field(name).type

    def compare(
        self, columns: Mapping[str, Any], ids: RowIds, of_type: NodeReport, report: Any
    ) -> None:
        """Count the rows that say something else than the first of their id, and name some.

        Args:
            columns: pyarrow ``ChunkedArray``s of the first rows, by name.
            report: Where bad rows are noted.
        """
        if not self._rows:
            return
        import pyarrow
        from pyarrow import compute

        rows = np.concatenate(self._rows)
        differs = np.full(len(rows), -1, np.int64)
        for number, name in enumerate(self._columns):
            values = self._reader.whole_column(name, self._chunks[name], self._kept)
            first = columns[name].take(arrow_array(rows))
            if values.type != first.type:
                values, first = as_text(values), as_text(first)
            try:
                is_equal = compute.equal(values, first)
            except pyarrow.ArrowNotImplementedError:  # of lists
                pairs = zip(values.to_pylist(), first.to_pylist(), strict=True)
                is_equal = arrow_array(np.array([a == b for a, b in pairs]))
            equal = compute.fill_null(is_equal, False).to_numpy(zero_copy_only=False)
            both_null = values.is_null().to_numpy() & first.is_null().to_numpy()
            differs[(differs < 0) & ~equal & ~both_null] = number
        conflicting = np.flatnonzero(differs >= 0)
        of_type.num_conflicting = len(conflicting)
        if not len(conflicting):
            return
        all_ids = ids.arrow()
        files = np.repeat(np.arange(len(self._where)), [len(at) for _, at in self._where])
        numbers = np.concatenate([at for _, at in self._where])
        for index in conflicting[: report.num_wanted()].tolist():
            column = self._columns[differs[index]]
            report.note(
                BadRow(
                    file=self._where[files[index]][0],
                    row=int(numbers[index]),
                    column=column,
                    value=shown_id(all_ids[int(rows[index])]),
                    problem="this id came before with another value in the column",
                    cure="the first row counts; drop the wrong one",
                )
            )
