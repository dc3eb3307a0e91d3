# SPDX-License-Identifier: Apache-2.0
"""Drawing neighbours and renumbering ids, by counter-based random numbers."""

from ._compact import IdTable
from ._draw import draw_neighbors
from ._edge_mask import EdgeMask, edge_keys, random_seed
from ._random import below, key_state, states, unit, word
