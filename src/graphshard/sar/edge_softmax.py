# SPDX-License-Identifier: Apache-2.0
"""The name of ``sar.edge_softmax``."""

from ..graph import edge_softmax as edge_softmax
