# SPDX-License-Identifier: Apache-2.0
"""Writing a partition."""

from ._save import partition_graph
from ._writer import PartitionWriter, check_graph_name
