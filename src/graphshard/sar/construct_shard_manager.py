# SPDX-License-Identifier: Apache-2.0
"""The names of ``sar.construct_shard_manager``."""

from ..fullbatch import construct_full_graph as construct_full_graph
from ..fullbatch import construct_mfgs as construct_mfgs
from ..servers import convert_dist_graph as convert_dist_graph
