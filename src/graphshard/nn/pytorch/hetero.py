# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.nn.pytorch.hetero``."""

from ..conv import HeteroGraphConv

__all__ = ["HeteroGraphConv"]
