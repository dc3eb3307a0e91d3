# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.nn.pytorch.glob``."""

from ..glob import (
    AvgPooling,
    GlobalAttentionPooling,
    MaxPooling,
    Set2Set,
    SortPooling,
    SumPooling,
    WeightAndSum,
)

__all__ = [
    "AvgPooling",
    "GlobalAttentionPooling",
    "MaxPooling",
    "Set2Set",
    "SortPooling",
    "SumPooling",
    "WeightAndSum",
]
