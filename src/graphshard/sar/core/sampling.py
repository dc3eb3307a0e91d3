# SPDX-License-Identifier: Apache-2.0
"""The names of ``sar.core.sampling``."""

from ...sampling import DataLoader as DataLoader
from ...sampling import DistNeighborSampler as DistNeighborSampler
