# SPDX-License-Identifier: Apache-2.0
"""The name of ``sar.core.sar_aggregation``."""

from ...fullbatch import message_has_parameters as message_has_parameters
