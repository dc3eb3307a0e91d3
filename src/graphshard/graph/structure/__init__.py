# SPDX-License-Identifier: Apache-2.0
"""Types, ids and edges of a graph, before it has any features."""

from ._construct import (
    check_count,
    checked_counts,
    least_counts,
    read_edges,
    read_relations,
)
from ._ids import (
    check_ids,
    id_tensor,
)
from ._schema import (
    ALL,
    EID,
    ETYPE,
    NID,
    NTYPE,
    Schema,
    is_all,
    joined_name,
)

__all__ = [
    "ALL",
    "EID",
    "ETYPE",
    "NID",
    "NTYPE",
    "Schema",
    "check_count",
    "check_ids",
    "checked_counts",
    "id_tensor",
    "is_all",
    "joined_name",
    "least_counts",
    "read_edges",
    "read_relations",
]
