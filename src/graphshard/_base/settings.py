# SPDX-License-Identifier: Apache-2.0
"""Notes in the annotations of settings, from which options of the command line are made.

Like all that a help text is made of it imports neither torch nor numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin

LONGEST_TIMEOUT = 1_000_000_000
"""Seconds, some 30 years: what the clocks of all systems hold."""


@dataclass(frozen=True)
class Unset:
    """What a field or option that is left out stands for; in its annotation, for the reader."""

    text: str


@dataclass(frozen=True)
class OnlyWith:
    """The values of another field with which a field has an effect; in its annotation."""

    field: str
    values: tuple[str, ...]


_Note = TypeVar("_Note")


def notes_of(hint: Any, kind: type[_Note]) -> list[_Note]:
    """The notes of one kind in a field's annotation."""
    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return [note for note in notes if isinstance(note, kind)]
