# SPDX-License-Identifier: Apache-2.0
"""The names of ``sar.core.graphshard``; one class serves one type and several."""

from ...fullbatch import GraphShard as GraphShard
from ...fullbatch import GraphShardManager as GraphShardManager

HeteroGraphShardManager = GraphShardManager
