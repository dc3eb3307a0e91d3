# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.nn.functional``."""

from ...graph import edge_softmax

__all__ = ["edge_softmax"]
