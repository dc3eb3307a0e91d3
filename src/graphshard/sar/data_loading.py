# SPDX-License-Identifier: Apache-2.0
"""The names of ``sar.data_loading``."""

from ..fullbatch import load_dgl_partition_data as load_dgl_partition_data
from ..fullbatch import suffix_key_lookup as suffix_key_lookup
from ..servers import load_dgl_partition_data_from_graph as load_dgl_partition_data_from_graph
