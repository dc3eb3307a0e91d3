# SPDX-License-Identifier: Apache-2.0
"""Layers that give one row per graph of a batch; the names of ``dgl.nn.glob``."""

from ._pooling import (
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
