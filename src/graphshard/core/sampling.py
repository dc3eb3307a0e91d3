# SPDX-License-Identifier: Apache-2.0
"""Names at SAR's places: ``sar.core.sampling``."""

from ..sampling import DataLoader, DistNeighborSampler

__all__ = ["DataLoader", "DistNeighborSampler"]
