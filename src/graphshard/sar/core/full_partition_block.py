# SPDX-License-Identifier: Apache-2.0
"""The name of ``sar.core.full_partition_block``."""

from ...fullbatch import DistributedBlock as DistributedBlock
