# SPDX-License-Identifier: Apache-2.0
"""Aliases, and notes in the annotations of settings, shared by all of graphshard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin

import numpy as np
import torch

CanonicalEType: TypeAlias = tuple[str, str, str]
"""(source node type, relation name, destination node type)."""

EType: TypeAlias = str | CanonicalEType
"""A relation by its name, where that is unambiguous, or by its canonical triple."""

Target: TypeAlias = Literal["u", "v", "e"]
"""Which end of an edge an operand lives on: source, destination, or the edge itself."""

NormBy: TypeAlias = Literal["dst", "src"]

Ids: TypeAlias = torch.Tensor | np.ndarray[Any, Any] | Sequence[int] | int
NodeIds: TypeAlias = Ids | Mapping[str, Ids]
"""Ids, or on a graph of several types from type to ids."""
EdgeIds: TypeAlias = Ids | Mapping[str, Ids] | Mapping[CanonicalEType, Ids] | Mapping[EType, Ids]
"""Ids, or on a graph of several relations from relation to ids."""

EdgesOrPairs: TypeAlias = Ids | tuple[Ids, Ids]
"""Edge ids, or a pair (source ids, destination ids)."""

Device: TypeAlias = torch.device | str | int

TensorDict: TypeAlias = dict[str, torch.Tensor]
TensorMapping: TypeAlias = Mapping[str, torch.Tensor]

DEFAULT_NTYPE = "_N"
DEFAULT_ETYPE = "_E"
DEFAULT_CANONICAL_ETYPE: CanonicalEType = (DEFAULT_NTYPE, DEFAULT_ETYPE, DEFAULT_NTYPE)

INDEX_DTYPES = (torch.int32, torch.int64)
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
