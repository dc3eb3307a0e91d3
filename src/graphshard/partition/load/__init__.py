# SPDX-License-Identifier: Apache-2.0
"""Reading a partition, and finding out whether it is whole."""

from ._load import (
    load_part,
    load_partition,
    load_partition_book,
    load_partition_feats,
    load_partition_stats,
    open_features,
)
from ._verify import verify_partition
