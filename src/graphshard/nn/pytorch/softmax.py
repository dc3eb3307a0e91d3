# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.nn.pytorch.softmax``."""

from ...graph import edge_softmax

__all__ = ["edge_softmax"]
