# SPDX-License-Identifier: Apache-2.0
"""Types, ids and edges of a graph, before it has any features."""

from ._batch_counts import kept_counts, read_batch_counts
from ._construct import check_count, checked_counts, least_counts, read_edges, read_relations
from ._ids import as_integers, by_first_occurrence, check_ids, id_tensor, places_of
from ._schema import ALL, EID, ETYPE, NID, NTYPE, Schema, is_all, joined_name
