# SPDX-License-Identifier: Apache-2.0
"""Columns of tables as labels: `LabelFit` finds the classes, `Labels` numbers them and names them.

What a label is follows from ``task``, where it is given, and from the column:

================================== ==========================================================
column                             without a task
================================== ==========================================================
text, booleans, dictionaries       classes
integers of any width              classes
reals, decimals                    classes, if all are whole numbers of at most `REAL_CLASSES`
                                   distinct values (as pandas writes integers with gaps);
                                   otherwise regression
lists of text, or of integers      sets of classes (multi-label)
lists of one length, only 0 and 1  a place for each class: one-hot if every row has exactly one
                                   1, otherwise multi-label
lists of reals of one length       regression with several targets
several columns                    as lists of one length, whose classes are the columns' names
================================== ==========================================================

Classes are numbered in the order of their values: numbers by size, text by code points, false
before true. They keep their type: `Labels.decode` turns numbers of classes back into an Arrow array
of the label's own type. Null and NaN mean unknown; an empty list is a node with no class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import _columns
from ._columns import DistinctValues, Value, family_of
from .encodings import EncodedCounts

if TYPE_CHECKING:
    import pyarrow as pa

MAX_CLASSES = 10_000
REAL_CLASSES = 100
TASKS = ("classification", "multi-label classification", "regression")
KINDS = ("classes", "one-hot", "multi-hot", "sets", "reals")


@dataclass(frozen=True, kw_only=True)
class Labels:
    """How label columns become numbers of classes, or real targets, and back.

    Args:
        columns: Their names.
        kind: ``classes``: a value a row; ``one-hot`` and ``multi-hot``: 0 or 1 for each class;
            ``sets``: lists of classes; ``reals``.
        type: The Arrow type of a label, or, for ``sets``, of an element: what `decode` makes.
        classes: The values of the classes, sorted; for one-hot and multi-hot the names of the
            columns, or the places in the list from 0. Empty for reals.
        value_type: Arrow's name of the type in which classes are compared.
        width: Number of places or of targets.
        separator: What stands between the classes of text that is cut into several.
    """

    columns: tuple[str, ...]
    kind: str
    type: str
    classes: tuple[Value, ...] = ()
    value_type: str = "null"
    width: int = 1
    separator: str | None = None

    @property
    def task(self) -> str:
        """One of `TASKS`."""
        if self.kind == "reals":
            return "regression"
        return TASKS[self.kind in ("multi-hot", "sets")]

    @property
    def is_multilabel(self) -> bool:
        """Whether a row may have several classes."""
        return self.task == "multi-label classification"

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None for regression."""
        return None if self.kind == "reals" else len(self.classes)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes as they are shown."""
        return tuple(map(_columns.shown_value, self.classes))

    def encode(
        self, columns: Any, *, first_row: int = 0, counts: EncodedCounts | None = None
    ) -> NDArray[Any]:
        """Labels of rows.

        Args:
            columns: The column, or as many as there were.
            first_row: The number of the first row in the whole column, for errors.
            counts: Where unlabelled rows are counted as missing, and rows with a class that there
                was not when classes were found as unknown.

        Returns:
            Of classes int64 [n], -1 unknown; with several classes a row int64 [n, num_classes] of
            0 and 1, -1 in all of an unknown row; of regression float32 [n], or [n, width] where
            there are several targets, NaN unknown.

        Raises:
            ValueError: The values are not of the kind that they were.
        """
        counts = EncodedCounts() if counts is None else counts
        columns = _as_columns(columns, len(self.columns))
        num_rows = len(columns[0])
        out = self._empty(num_rows)
        step = max(_columns.PIECE_ROWS // max(self.width, len(self.classes), 1), 256)
        step = max(step, min(4 * len(self.classes), _columns.PIECE_ROWS))
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            parts = [column.slice(start, stop - start) for column in columns]
            self._encode_piece(parts, out[start:stop], first_row + start, counts)
        counts.rows += num_rows
        return out

    @staticmethod
    def is_labelled(labels: NDArray[Any]) -> NDArray[np.bool_]:
        """Which rows of what `encode` has made are known: bool [n]."""
        is_unknown = np.isnan(labels) if labels.dtype.kind == "f" else labels < 0
        return ~is_unknown if labels.ndim == 1 else ~np.logical_or.reduce(is_unknown, axis=1)

    def _empty(self, num_rows: int) -> NDArray[Any]:
        if self.kind == "reals":
            shape = (num_rows,) if self.width == 1 else (num_rows, self.width)
            return np.empty(shape, np.float32)
        shape = (num_rows, len(self.classes)) if self.is_multilabel else (num_rows,)
        return np.empty(shape, np.int64)

    def _encode_piece(
        self, parts: list[Any], out: NDArray[Any], first_row: int, counts: EncodedCounts
    ) -> None:
        name = self.columns[0]
        is_unlabelled: NDArray[np.bool_]
        if self.kind == "classes":
            is_unlabelled = self._encode_classes(parts[0], out, first_row, counts)
        elif self.kind == "sets":
            is_unlabelled = self._encode_sets(parts[0], out, first_row, counts)
        else:
            values = _rows_of(parts, self.columns, self.width, first_row)
            is_unlabelled = np.logical_or.reduce(np.isnan(values), axis=1)
            if self.kind == "reals":
                with np.errstate(over="ignore"):
                    out[...] = values if self.width > 1 else values[:, 0]
                _refuse_overflow(out, values, name, first_row)
                out[is_unlabelled] = np.nan
            else:
                self._encode_places(values, is_unlabelled, out, first_row)
        counts.missing += int(is_unlabelled.sum())

    def _encode_classes(
        self, part: Any, out: NDArray[Any], first_row: int, counts: EncodedCounts
    ) -> NDArray[np.bool_]:
        is_unlabelled = np.empty(len(part), bool)
        for start, piece in _columns.pieces(part):
            rows = slice(start, start + len(piece))
            out[rows], is_unlabelled[rows], is_unknown = self._place(piece, first_row + start)
            counts.count_unknown(piece, is_unknown)
        return is_unlabelled

    def _place(
        self, piece: pa.Array, first_row: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Of each value its class or -1, whether it is missing, and whether it is unknown."""
        array, outside = _columns.comparable(piece, self.value_type, self.columns[0], first_row)
        place, missing = _columns.positions(array, self._arrow_classes)
        if outside is not None:
            missing &= ~outside
        return place, missing, (place < 0) & ~missing

    @cached_property
    def _arrow_classes(self) -> pa.Array:
        import pyarrow as pa

        return pa.array(self.classes, _columns.arrow_value_type(self.value_type))

    def _encode_sets(
        self, part: Any, out: NDArray[Any], first_row: int, counts: EncodedCounts
    ) -> NDArray[np.bool_]:
        is_unlabelled = np.empty(len(part), bool)
        out[...] = 0
        name = self.columns[0]
        for start, piece in _columns.pieces(part, separator=self.separator, name=name):
            if family_of(piece.type) == "null":
                is_unlabelled[start : start + len(piece)] = True
                continue
            if family_of(piece.type) != "list":
                raise ValueError(
                    f"labels of column '{name}' must be lists, as where classes were found (got "
                    f"{piece.type}); convert the column"
                )
            elements, rows, missing = _columns.words_of_lists(piece)
            place, is_null, is_unknown = self._place(elements, first_row + start)
            counts.count_unknown(elements, is_unknown)
            out[start + rows[place >= 0], place[place >= 0]] = 1
            missing[rows[is_null]] = True  # some element is unknown, so the set is
            is_unlabelled[start : start + len(piece)] = missing
        out[is_unlabelled] = -1
        return is_unlabelled

    def _encode_places(
        self,
        values: NDArray[np.float64],
        is_unlabelled: NDArray[np.bool_],
        out: NDArray[Any],
        first_row: int,
    ) -> None:
        wrong = ~is_unlabelled & ~((values == 0) | (values == 1)).all(axis=1)
        rule = "0 or 1"
        if self.kind == "one-hot":
            sums = values.sum(axis=1)
            is_unlabelled |= sums == 0
            wrong |= ~is_unlabelled & (sums != 1)
            rule = "0 but for one 1"
        if wrong.any():
            row = int(wrong.argmax())
            shown = ", ".join(f"{value:g}" for value in values[row][:8])
            raise ValueError(
                f"labels in {_spoken(self.columns)} must be {rule} (got {shown}"
                f"{', ...' if values.shape[1] > 8 else ''} in row {first_row + row}, from 0); use "
                'task = "multi-label classification" for several classes a row, or '
                '"regression" for reals'
            )
        if self.kind == "one-hot":
            out[...] = np.where(is_unlabelled, -1, np.where(values == 1, 1, 0).argmax(axis=1))
        else:
            out[...] = np.where(is_unlabelled[:, None], -1, values == 1)

    def decode(self, numbers: NDArray[Any]) -> pa.Array:
        """Labels in the type in which they were given, for predictions.

        Args:
            numbers: Of classes int [n], -1 for none; with several classes a row [n, num_classes] of
                0 and 1; of regression reals [n] or [n, width].

        Returns:
            Values of the classes, lists of them, or float64; null for -1 and NaN.
        """
        import pyarrow as pa

        numbers = np.asarray(numbers)
        if self.kind == "reals":
            return self._decode_reals(numbers)
        values = self._arrow_classes.cast(_columns.arrow_type(self.type))
        if not self.is_multilabel:
            return values.take(pa.array(numbers, pa.int64(), mask=numbers < 0))
        rows, place = np.nonzero(numbers > 0)
        counts = np.bincount(rows, minlength=len(numbers))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        is_unknown = (numbers < 0).any(axis=1)
        mask = pa.array(is_unknown) if is_unknown.any() else None
        return pa.ListArray.from_arrays(pa.array(offsets), values.take(pa.array(place)), mask=mask)

    def _decode_reals(self, numbers: NDArray[Any]) -> pa.Array:
        import pyarrow as pa

        flat = numbers.reshape(-1).astype(np.float64)
        values = pa.array(flat, mask=np.isnan(flat))
        if self.width == 1:
            return values
        return pa.FixedSizeListArray.from_arrays(values, self.width)

    def as_json(self) -> dict[str, Any]:
        """Everything that `of_json` needs."""
        content: dict[str, Any] = {
            "columns": list(self.columns),
            "label": self.kind,
            "type": self.type,
            "value_type": self.value_type,
            "width": self.width,
            "classes": list(self.classes),
        }
        if self.separator is not None:
            content["separator"] = self.separator
        return content

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Labels:
        """The labels that `as_json` has described.

        Raises:
            ValueError: Something in it cannot be.
        """
        try:
            kind, value_type = content["label"], content["value_type"]
            if kind not in KINDS or value_type not in _columns.VALUE_TYPES:
                raise ValueError(f"there are no labels {kind!r} of {value_type!r}")
            _columns.arrow_type(content["type"])
            return cls(
                columns=tuple(content["columns"]),
                kind=kind,
                type=content["type"],
                classes=_columns.checked_values(content["classes"], value_type),
                value_type=value_type,
                width=content["width"],
                separator=_columns.checked_separator(content, content["columns"][0]),
            )
        except KeyError as error:
            raise ValueError(f"labels must say their {error} (they do not)") from None
        except (TypeError, AttributeError) as error:
            raise ValueError(f"labels must be as labels are written ({error})") from None


class LabelFit:
    """The classes of a label column, or of several, batch by batch.

    Args:
        fields: The name and the Arrow type of the column, or of each.
        task: One of `TASKS`; None: by the rule above.
        max_classes: More classes are an error; None: `REAL_CLASSES` of reals, `MAX_CLASSES` of
            others.
        separator: What stands between the classes of a cell, of a column of text that is to be cut
            into several.

    Raises:
        ValueError: The columns cannot be labels, or not of this task.
    """

    def __init__(
        self,
        fields: pa.Field | Sequence[pa.Field],
        task: str | None = None,
        max_classes: int | None = None,
        separator: str | None = None,
    ) -> None:
        fields = list(fields) if isinstance(fields, list | tuple) else [fields]
        self.columns: tuple[str, ...] = tuple(field.name for field in fields)
        self._separator = separator
        self._types = [_columns.type_of_words(field.type, separator) for field in fields]
        self._task = task
        if task is not None and task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)} (got {task!r})")
        self._form = self._check_types()
        if self._form == "lists":
            self._value_type = _columns.plain_type(self._types[0].value_type)
        else:
            self._value_type = self._types[0]
        self._is_real = _columns.is_real(self._value_type)
        inner = family_of(self._value_type)
        self._is_set = self._form == "lists" and inner != "boolean" and not self._is_real
        default = REAL_CLASSES if self._is_real else MAX_CLASSES
        self._max_classes = default if max_classes is None else max_classes
        self._num_rows = 0
        self._num_labelled = 0
        self._all_whole = True
        self._places = _OnesInRows(len(fields) if self._form == "columns" else None)
        has_values = self._form != "columns" and task != "regression"
        value_type = _columns.value_type_of(self._value_type) if has_values else "null"
        self._distinct = DistinctValues(value_type, self._max_classes)

    def _check_types(self) -> str:
        """Whether labels are single values, lists, or several columns."""
        families = [family_of(kind) for kind in self._types]
        form, inner = "values", families
        if len(families) > 1:
            form = "columns"
        elif families == ["list"]:
            form, inner = "lists", [family_of(self._types[0].value_type)]
        allowed = {"number", "boolean", "null"} | ({"text"} if form != "columns" else set())
        if self._task == "regression":
            allowed = {"number", "null"}
        if not set(inner) <= allowed:
            task = f" for {self._task}" if self._task else ""
            shown = ", ".join(str(kind) for kind in self._types)
            raise ValueError(
                f"labels{task} in {_spoken(self.columns)} must be {', '.join(sorted(allowed))} "
                f"(got {shown}); convert them, or choose another column or task"
            )
        if form == "values" and self._task == "multi-label classification":
            raise ValueError(
                f"labels of several classes a row must be lists, or several columns of 0 and 1 "
                f"(got column '{self.columns[0]}' of type {self._types[0]}); say the separator "
                'between classes, or use task = "classification"'
            )
        return form

    def update(self, columns: Any) -> None:
        """Take in the next rows of the column, or of each.

        Raises:
            ValueError: A number is infinite, or lists of reals differ in length.
        """
        columns = _as_columns(columns, len(self.columns))
        if self._form == "columns":
            for start in range(0, len(columns[0]), _columns.PIECE_ROWS):
                parts = [column.slice(start, _columns.PIECE_ROWS) for column in columns]
                rows = _rows_of(parts, self.columns, len(columns), self._num_rows)
                self._update_reals(rows)
                self._num_rows += len(rows)
            return
        name = self.columns[0]
        for _, piece in _columns.pieces(columns[0], separator=self._separator, name=name):
            if self._form == "values":
                self._update_values(piece)
            elif family_of(piece.type) == "list":
                self._update_lists(piece)
            self._num_rows += len(piece)

    def _update_values(self, piece: pa.Array) -> None:
        name, first_row = self.columns[0], self._num_rows
        if self._is_real or self._task == "regression":
            values = _columns.numbers(piece)
            _columns.refuse_infinities(values, name, first_row)
            known = values[~np.isnan(values)]
            self._all_whole &= bool((known == np.trunc(known)).all())
            self._num_labelled += len(known)
            if self._task == "regression" or (self._task is None and not self._all_whole):
                return
        array, _ = _columns.comparable(piece, self._distinct.value_type, name, first_row)
        if not self._is_real:
            self._num_labelled += len(array) - array.null_count
        self._distinct.update(array)

    def _update_lists(self, piece: pa.Array) -> None:
        name, first_row = self.columns[0], self._num_rows
        lengths = _columns.lengths_of_lists(piece)
        if not (lengths >= 0).any():
            return
        is_text = family_of(self._value_type) == "text"
        if not is_text and self._places.fits(lengths):
            rows = _columns.rows_of_lists(piece, self._places.width, name, first_row)[1]
            self._update_reals(rows)
        elif self._is_real or self._task == "regression":
            _columns.rows_of_lists(piece, self._places.width, name, first_row)  # raises
        else:
            self._num_labelled += int((lengths >= 0).sum())
        if self._distinct.value_type != "null" and not self._is_real:
            elements = _columns.plain(piece.flatten())
            value_type = self._distinct.value_type
            self._distinct.update(_columns.comparable(elements, value_type, name, first_row)[0])

    def _update_reals(self, rows: NDArray[np.float64]) -> None:
        _columns.refuse_infinities(rows, self.columns[0], self._num_rows)
        known = rows[~np.isnan(rows).any(axis=1)]
        self._num_labelled += len(known)
        self._places.update(known)

    def finish(self) -> Labels:
        """The labels.

        Raises:
            ValueError: No row has a label, or there are too many classes.
        """
        if not self._num_labelled:
            raise ValueError(
                f"{_spoken(self.columns)} must have a label in some row (got none in "
                f"{self._num_rows} rows); name another column, or check how missing values are "
                "written"
            )
        if self._form == "values":
            return self._finish_values()
        return self._finish_rows()

    def _finish_values(self) -> Labels:
        is_few = self._all_whole and not self._distinct.is_over
        if self._task == "regression" or (self._task is None and self._is_real and not is_few):
            return self._reals(1)
        self._check_number_of_classes()
        return self._of_distinct("classes")

    def _finish_rows(self) -> Labels:
        width, task = self._places.width or 0, self._task
        is_several = self._form == "columns" or self._is_real
        if task == "regression" or (task is None and is_several and not self._places.are_places):
            return self._reals(width)
        if self._places.are_places and family_of(self._value_type) != "text":
            is_single = self._places.are_single if task is None else task == "classification"
            has_names = self._form == "columns"
            return Labels(
                columns=self.columns,
                kind="one-hot" if is_single else "multi-hot",
                type="string" if has_names else "int64",
                classes=self.columns if has_names else tuple(range(width)),
                value_type="string" if has_names else "int64",
                width=width,
            )
        if task == "classification" or not self._is_set:
            raise ValueError(
                f"labels in {_spoken(self.columns)} must be 0 or 1 for each class (got other "
                f"values, or lists of several lengths, of type {self._types[0]}); use "
                + ('task = "multi-label classification"' if self._is_set else 'task = "regression"')
            )
        self._check_number_of_classes()
        return self._of_distinct("sets")

    def _reals(self, width: int) -> Labels:
        if not width:
            raise ValueError(
                f"labels in {_spoken(self.columns)} must have elements (got empty lists); leave "
                "cells empty whose label is unknown"
            )
        return Labels(columns=self.columns, kind="reals", type="double", width=width)

    def _of_distinct(self, kind: str) -> Labels:
        return Labels(
            columns=self.columns,
            kind=kind,
            type=_columns.alias_of(self._value_type),
            classes=self._distinct.sorted(),
            value_type=self._distinct.value_type,
            separator=self._separator,
        )

    def _check_number_of_classes(self) -> None:
        number, rows = len(self._distinct), self._num_labelled
        family = family_of(self._value_type)
        cure = "name the column of the class"
        if family == "number":
            cure = 'use task = "regression" if it is a quantity'
        if self._distinct.is_over:
            raise ValueError(
                f"labels in {_spoken(self.columns)} must be of at most {self._max_classes} classes "
                f"(got more distinct values, of type {self._value_type}); {cure}, or raise "
                "max_classes"
            )
        is_many = self._task is None and self._form == "values" and number > REAL_CLASSES
        if is_many and 2 * number > rows:
            raise ValueError(
                f"labels in {_spoken(self.columns)} must be classes that rows share (got {number} "
                f"distinct values in {rows} labelled rows); {cure}, or ask for "
                'task = "classification"'
            )


class _OnesInRows:
    """Whether rows of numbers can be 0 or 1 for each class, and how many are 1."""

    def __init__(self, width: int | None) -> None:
        self.width = width
        self.are_places = True
        self.are_single = True  # each row has exactly one 1

    def fits(self, lengths: NDArray[np.int64]) -> bool:
        """Whether lists have the one length that others had; -1: there is none."""
        lengths = lengths[lengths >= 0]
        if self.width is None and len(lengths):
            self.width = int(lengths[0])
        is_one = bool((lengths == self.width).all())
        self.are_places &= is_one and (self.width is None or self.width > 1)
        return is_one

    def update(self, rows: NDArray[np.float64]) -> None:
        is_one = rows == 1
        self.are_places &= bool((is_one | (rows == 0)).all())
        self.are_single &= bool((is_one.sum(axis=1) == 1).all())


def _as_columns(columns: Any, number: int) -> list[Any]:
    columns = list(columns) if isinstance(columns, list | tuple) else [columns]
    if len(columns) != number or len({len(column) for column in columns}) != 1:
        raise ValueError(
            f"labels must come as {number} columns of one length (got "
            f"{[len(column) for column in columns]}); give the columns that they were found in"
        )
    return columns


def _rows_of(
    parts: Sequence[Any], names: Sequence[str], width: int, first_row: int
) -> NDArray[np.float64]:
    """Numbers of [n, width], NaN where missing, from a column of lists, or from columns."""
    out = np.empty((len(parts[0]), width))
    for number, (part, name) in enumerate(zip(parts, names, strict=True)):
        for start, piece in _columns.pieces(part):
            rows = slice(start, start + len(piece))
            family = family_of(piece.type)
            if family == "list" and len(parts) == 1:
                row = first_row + start
                out[rows] = _columns.rows_of_lists(piece, width, name, row)[1]
            elif family in ("number", "boolean", "null"):
                out[rows, number if len(parts) > 1 else slice(None)] = (
                    _columns.numbers(piece) if len(parts) > 1 else _columns.numbers(piece)[:, None]
                )
            else:
                raise ValueError(
                    f"labels of column '{name}' must be numbers, as where labels were found (got "
                    f"{piece.type}); convert the column"
                )
    return out


def _refuse_overflow(
    out: NDArray[Any], values: NDArray[np.float64], name: str, first_row: int
) -> None:
    _columns.refuse_infinities(values, name, first_row)
    is_over = np.isinf(out).reshape(len(out), -1).any(axis=1)
    if is_over.any():
        row = int(is_over.argmax())
        raise ValueError(
            f"labels of column '{name}' must fit float32 (got {values[row].tolist()} in row "
            f"{first_row + row}, from 0); use a smaller unit, or the logarithm"
        )


def _spoken(columns: Sequence[str]) -> str:
    if len(columns) == 1:
        return f"column '{columns[0]}'"
    return f"columns {_columns.first_few(list(columns))}"
