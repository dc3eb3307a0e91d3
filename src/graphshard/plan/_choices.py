# SPDX-License-Identifier: Apache-2.0
"""What runs decide by memory: how remote rows come, and where neighbours are drawn.

The only place of these rules: graphs and samplers ask here, and so does a plan.
"""

from __future__ import annotations

LAYERS_ALIVE = 3
"""Layers whose halo rows are alive at once in a one-shot backward, a guess for the usual models."""

SHARE_OF_FREE_MEMORY = 4
"""What is fetched or copied for speed alone may take one part in so many of the memory left."""


def budget_of(free: float) -> int:
    """Bytes of free memory that may be taken for speed alone."""
    return int(free) // SHARE_OF_FREE_MEMORY


def oneshot_bytes(num_halo_rows: float, row_width: float) -> float:
    """Bytes of a rank's halo rows in one-shot mode, of float32 rows."""
    return num_halo_rows * row_width * 4 * LAYERS_ALIVE


def fits_oneshot(num_halo_rows: float, row_width: float, budget: float) -> bool:
    """Whether one rank can take its whole halo at once."""
    return oneshot_bytes(num_halo_rows, row_width) <= budget


def fits_replicated(structure_bytes: float, budget: float) -> bool:
    """Whether a host can hold the whole graph's structure beside its parts."""
    return structure_bytes <= budget
