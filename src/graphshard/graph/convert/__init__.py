# SPDX-License-Identifier: Apache-2.0
"""Graphs from tables and other libraries, and back."""

from ._libraries import (
    from_dgl,
    from_edge_index,
    from_networkx,
    from_scipy,
    require,
    stack_attribute,
    to_dgl,
    to_edge_index,
    to_networkx,
    to_scipy,
)
from ._tables import from_csv, from_parquet, to_csv, to_parquet
