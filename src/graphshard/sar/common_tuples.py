# SPDX-License-Identifier: Apache-2.0
"""The names of ``sar.common_tuples``."""

from ..fullbatch import PartitionData as PartitionData
