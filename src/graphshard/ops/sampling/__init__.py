# SPDX-License-Identifier: Apache-2.0
"""Drawing neighbours and renumbering ids, by counter-based random numbers."""

from ._draw import draw_neighbors
from ._edge_mask import EdgeMask, edge_keys, random_seed
from ._ids_and_rows import IdTable, copy_rows, group_by_range, ungroup
from ._random import below, key_state, states, unit, word
