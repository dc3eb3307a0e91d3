# SPDX-License-Identifier: Apache-2.0
"""Aliases shared by all of graphshard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

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
