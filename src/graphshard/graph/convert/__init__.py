# SPDX-License-Identifier: Apache-2.0
"""Graphs from tables and other libraries, and back."""

from ._convert import (
    from_edge_index,
    from_networkx,
    from_scipy,
    stack_attribute,
    to_edge_index,
    to_networkx,
    to_scipy,
)
from ._dgl import from_dgl, to_dgl
from ._optional import require
from ._tables import from_csv, from_parquet, to_csv, to_parquet
