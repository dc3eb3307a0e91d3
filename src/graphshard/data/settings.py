# SPDX-License-Identifier: Apache-2.0
"""What users say about data to be partitioned; options of the command line are made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

TableFormat: TypeAlias = Literal["csv", "parquet", "arrow", "json"]
Dangling: TypeAlias = Literal["drop", "add", "error"]
Parallel: TypeAlias = Literal["keep", "drop"]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is done to a graph before it is partitioned. None: what its published results did."""

    row_normalize: Annotated[
        bool | None, "Divide each feature row by its sum; default: yes for citation data sets."
    ] = None
    self_loops: Annotated[
        bool | None,
        "Give every node exactly one self loop, as GCN and GAT need; default: yes for citation "
        "data sets.",
    ] = None
    bidirected: Annotated[bool, "Add the reverse of every edge."] = False
    inverse: Annotated[
        bool | None, "Add the inverse of every relation; default: yes where there are relations."
    ] = None
